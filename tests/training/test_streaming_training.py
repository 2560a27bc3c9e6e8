"""What the training of a streaming speculator knows, and when."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.tiny import VOCABULARY, tiny_speculator, tiny_target

from slipstream.core.errors import InputError
from slipstream.data.batches import collate
from slipstream.data.rendering import Sample
from slipstream.speculators.streaming.config import StreamingConfig
from slipstream.speculators.streaming.losses import StreamLosses
from slipstream.speculators.streaming.segments import lossless_losses
from slipstream.targets.lora import LoraSettings
from slipstream.training.module import check_on_one_device, total_steps
from slipstream.training.run import precision
from slipstream.training.speculator import SpeculatorTraining

SAMPLES = [Sample([5, 9, 5, 9, 7, 5], 3), Sample([4, 8, 4, 8, 8, 1, 2, 30], 5)]


def losses_of(speculator, target) -> StreamLosses:
    return lossless_losses(target, speculator, collate(SAMPLES), torch.ones(2), None)


def test_scores_of_pairs_learn_on_top_of_streams_that_learn_without_them():
    target = tiny_target()
    plain = tiny_speculator(target, num_streams=2)
    scored = tiny_speculator(target, num_streams=2, copy_scores=True, transition_rank=2)
    scored.load_state_dict(plain.state_dict(), strict=False)
    for speculator in (plain, scored):
        losses_of(speculator, target).total.backward()
    plain, scored = (
        {name: parameter.grad for name, parameter in each.named_parameters()}
        for each in (plain, scored)
    )
    assert scored["copying.stream"].any() and scored["transitions.child"].any()
    for name, gradient in plain.items():
        torch.testing.assert_close(scored[name], gradient, rtol=0, atol=1e-12)


def test_scores_of_pairs_see_the_text_up_to_the_root_and_no_further(monkeypatch):
    target = tiny_target()
    speculator = tiny_speculator(target, num_streams=2, copy_scores=True)
    calls = []
    score = speculator.copying.add_to

    def watched(logits, of_parent, of_child, streams, parents, texts, lengths):
        calls.append((streams, parents, texts, lengths))
        return score(logits, of_parent, of_child, streams, parents, texts, lengths)

    monkeypatch.setattr(speculator.copying, "add_to", watched)
    losses_of(speculator, target)
    [(streams, parents, texts, lengths)] = calls
    known = [text[:length].tolist() for text, length in zip(texts, lengths, strict=True)]
    expected = [
        (stream, sample.ids[: end + 1], sample.ids[end + stream])
        for sample in SAMPLES
        for end in range(sample.prompt_length, len(sample.ids))
        for stream in range(2)
        if end + stream + 1 < len(sample.ids)
    ]
    assert list(zip(streams.tolist(), known, parents.tolist(), strict=True)) == expected
    assert all(0 <= parent < VOCABULARY for parent in parents.tolist())


def trained(**given) -> SpeculatorTraining:
    usual = dict(
        learning_rate=1e-3, lora_learning_rate=None, weight_decay=0.0, warmup_steps=0,
        num_segments=None, checkpointing=False, validation_prompts=1, validation_budget=4,
        start_from=None,
    )  # fmt: skip
    config = StreamingConfig(num_streams=2, num_msa_layers=2, adapter_rank=2)
    return SpeculatorTraining(tiny_target(), config, **usual | given)


def test_a_rate_of_zero_is_one():
    assert trained(lora_learning_rate=0.0).groups()[1]["lr"] == 0.0
    assert trained().groups()[1]["lr"] == 1e-3


def test_gradients_of_segments_would_not_be_scaled():
    module = trained(num_segments=2)
    for given, said in (("16-mixed", "trainer.precision: "), ("bf16-mixed", None)):
        module.trainer = SimpleNamespace(precision=given)
        if said is None:
            module.on_fit_start()
        else:
            with pytest.raises(InputError, match=said):
                module.on_fit_start()


@pytest.mark.parametrize(("limit", "steps"), [(1.0, 30), (0.5, 15), (4, 12), (40, 30)])
def test_the_rate_falls_to_zero_at_the_end_of_a_limited_run(limit, steps):
    trainer = SimpleNamespace(
        max_steps=-1, max_epochs=3, accumulate_grad_batches=1, limit_train_batches=limit
    )
    assert total_steps(trainer, 10) == steps


@pytest.mark.parametrize("given", ["bf16-true", "16-true"])
def test_numbers_that_rotary_frequencies_do_not_fit_are_refused(given):
    with pytest.raises(InputError, match=f"^trainer.precision: {given} would round"):
        precision(given, "cpu", "bfloat16")


def test_a_target_on_several_devices_is_refused():
    target = tiny_target()
    target.model.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(InputError, match=r"^target.device_map: .*trainer=sharded"):
        check_on_one_device(target)
    target.model.hf_device_map = {"": "cpu"}
    check_on_one_device(target)


def test_in_shared_mode_every_answer_is_the_last_of_its_sample():
    """Rows of earlier turns have no streams when a conversation is read."""
    sample = Sample([1, 2, 3, 4, 5, 6, 7], 5, ((1, 3),))
    assert sample.turns == [Sample([1, 2, 3], 1), Sample([1, 2, 3, 4, 5, 6, 7], 5)]
    for mode, one in (("lossless", False), ("shared", True)):
        config = StreamingConfig(num_streams=2, num_msa_layers=2)
        if one:
            lora = LoraSettings(rank=2)
            config = replace(config, mode=mode, adapter_rank=0, root_rank=0, lora=lora)
        settings = 0.1, None, 0.0, 0, None, False, 0, 4, None
        module = SpeculatorTraining(tiny_target(), config, *settings)
        data = SimpleNamespace(prepare=lambda *_: None)
        module.prepare(data)
        assert data.one_answer == module.shared == one
        own = sum(parameter.nbytes for parameter in module.speculator.parameters())
        assert (module.validation_bytes() > 2 * own) == one and module.validation_bytes() >= 2 * own
