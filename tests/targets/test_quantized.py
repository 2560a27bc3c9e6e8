"""8-bit and NF4 targets: what is quantised, what runs beside it, and who may open what."""

import json

import pytest
import torch
from tests.tiny import save_tiny_target, tiny_speculator
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.batches import collate
from slipstream.data.rendering import Sample
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.streaming import Streaming
from slipstream.evaluation.exactness import DraftlessReference, PlainReference
from slipstream.speculators.checkpoint import load_speculator, save_speculator
from slipstream.speculators.streaming.segments import lossless_losses, shared_losses
from slipstream.targets.loading import load_target, target_of
from slipstream.targets.lora import LoraSettings, save_lora, with_lora
from slipstream.targets.quantized import QUANTIZATIONS, is_quantized
from slipstream.targets.target import Target

PROMPT, LIMITS = [3, 17, 5, 29, 11, 8], Limits(12)
SAMPLES = [Sample([5, 9, 5, 9, 7, 5], 3), Sample([4, 8, 4, 8, 8, 1, 2, 30], 5)]
IDS = torch.tensor([PROMPT])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("target")
    return str(save_tiny_target(path, hidden_size=64, intermediate_size=128))


@pytest.fixture(params=QUANTIZATIONS)
def target(folder, request) -> Target:
    return load_target(folder, quantization=request.param)


def speculator_of(target: Target, **arguments):
    return tiny_speculator(target, **arguments).float()


def logits(target: Target) -> torch.Tensor:
    positions = torch.arange(IDS.shape[1])[None]
    return target.logits(target.forward(IDS, positions, None, None).hidden)


def losses_of(target: Target, speculator, num_segments: int | None):
    batch, weights = collate(SAMPLES), torch.ones(3)
    if speculator.lora is None:
        return lossless_losses(target, speculator, batch, weights, num_segments)
    adapted = speculator.adapted(target)
    return shared_losses(adapted, speculator, batch, 1.0, weights, num_segments)


def test_the_linears_of_the_layers_are_quantised_and_nothing_else(folder, target):
    for layer in target.family.layers:
        for name in target.family.attention_linears + target.family.mlp_linears:
            assert is_quantized(layer.get_submodule(name))
        assert not is_quantized(layer.input_layernorm)
    assert not is_quantized(target.head)
    assert target.dtype == torch.float32
    ours, plain = logits(target), logits(load_target(folder))
    assert (ours - plain).abs().max() > 1e-4
    assert torch.cosine_similarity(ours, plain, dim=-1).mean() > 0.8


@pytest.mark.parametrize("schedule", ["fused", "deferred"])
def test_lossless_output_is_that_of_the_quantised_target(target, schedule):
    expected = PlainReference(target, LIMITS).generate(PROMPT)
    assert len(set(expected)) > 3
    engine = Engine(target, Streaming(speculator_of(target), schedule, 3), Sampling(), LIMITS, 12)
    assert engine.generate(PROMPT).ids == expected


def test_shared_output_is_that_of_one_token_a_forward(target):
    speculator = speculator_of(target, mode="shared")
    expected = DraftlessReference(target, Streaming(speculator, "fused", 3), LIMITS)
    engine = Engine(target, Streaming(speculator, "fused", 3), Sampling(), LIMITS, 12)
    answer = engine.generate(PROMPT).ids
    assert answer == expected.generate(PROMPT)
    assert answer != PlainReference(target, LIMITS).generate(PROMPT)


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_a_training_step_learns_adapters_in_full_precision_over_frozen_weights(
    folder, target, mode
):
    kind = target.fingerprint["quantization"]
    target = load_target(folder, quantization=kind, packed=False)
    speculator = speculator_of(target, mode=mode)
    before = logits(target)
    losses = [losses_of(target, speculator, num_segments).total for num_segments in (None, 3)]
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)
    losses[0].backward()
    for name, parameter in speculator.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.grad is not None and parameter.grad.any(), name
    torch.optim.SGD(speculator.parameters(), lr=0.02).step()
    assert losses_of(target, speculator, None).total < losses[0]
    assert torch.equal(logits(target), before)


@pytest.mark.parametrize("mode", ["lossless", "shared"])
def test_a_saved_speculator_opens_on_the_same_quantised_target_alone(
    folder, target, mode, tmp_path
):
    speculator = speculator_of(target, mode=mode)
    save_speculator(tmp_path / "made", speculator, target, 8, "")
    kind = target.fingerprint["quantization"]
    again = load_target(folder, quantization=kind)
    opened = load_speculator(tmp_path / "made", again)
    answers = [
        Engine(each, Streaming(own, "auto", 3), Sampling(), LIMITS, 8).generate(PROMPT).ids
        for each, own in ((target, speculator), (again, opened))
    ]
    assert answers[0] == answers[1]
    other = next(each for each in QUANTIZATIONS if each != kind)
    for wrong in (None, other):
        with pytest.raises(
            InputError, match=rf"with {kind} weights; set target\.quantization={kind}"
        ):
            load_speculator(tmp_path / "made", load_target(folder, quantization=wrong))


def test_a_speculator_of_the_unquantised_target_is_refused(folder, target, tmp_path):
    plain = load_target(folder)
    save_speculator(tmp_path / "made", speculator_of(plain), plain, 8, "")
    with pytest.raises(
        InputError, match=r"with unquantised weights; set target\.quantization=null"
    ):
        load_speculator(tmp_path / "made", target)


@torch.no_grad()
def test_a_model_that_has_run_keeps_its_weights(folder):
    """A forward on a CPU that multiplies bfloat16 reorders 4-bit weights."""
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    how = dict(quantization_config=settings, dtype=torch.float32, device_map={"": "cpu"})
    model = AutoModelForCausalLM.from_pretrained(folder, **how)
    before = model(IDS).logits
    first = target_of(model).fingerprint
    assert torch.equal(model(IDS).logits, before)
    del model.slipstream_target
    assert target_of(model).fingerprint == first
    assert torch.equal(model(IDS).logits, before)


def test_an_adapter_runs_beside_quantised_weights(folder, target, tmp_path):
    adapted, trained = with_lora(target, LoraSettings(rank=2))
    before = logits(target)
    assert torch.equal(logits(adapted), before)
    with torch.no_grad():
        for tensor in trained.values():
            tensor.normal_(std=0.1)
    save_lora(tmp_path, adapted)
    opened = load_target(
        folder, quantization=target.fingerprint["quantization"], adapter=str(tmp_path)
    )
    torch.testing.assert_close(logits(opened), logits(adapted), rtol=0, atol=1e-5)
    assert torch.equal(logits(target), before)
    assert opened.fingerprint["weights"] != target.fingerprint["weights"]


def test_new_lora_layers_share_the_quantised_weights(target):
    adapted, _ = with_lora(target, LoraSettings(rank=2))
    for index, layer in enumerate(target.family.layers):
        theirs = adapted.family.layers[index].self_attn.q_proj.get_base_layer()
        assert theirs.weight is layer.self_attn.q_proj.weight


def test_unknown_kinds_and_a_missing_library_are_one_sentence(folder, monkeypatch):
    with pytest.raises(InputError, match="quantization: must be one of int8, nf4, or null"):
        load_target(folder, quantization="int3")
    monkeypatch.setattr("transformers.utils.is_bitsandbytes_available", lambda: False)
    with pytest.raises(InputError, match="needs bitsandbytes; pip install bitsandbytes"):
        load_target(folder, quantization="nf4")


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_weights_that_were_saved_quantised_are_as_if_they_had_been_quantised_here(
    folder, tmp_path, kind
):
    """bitsandbytes' own threshold would make a token's logits depend on its neighbours."""
    own = load_target(folder, quantization=kind, packed=False)
    own.model.save_pretrained(tmp_path)
    own.tokenizer.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    saved = json.loads(path.read_text())
    saved["quantization_config"] |= {"llm_int8_threshold": 6.0, "bnb_4bit_compute_dtype": "float16"}
    path.write_text(json.dumps(saved))
    for asked in (None, kind):
        opened = load_target(str(tmp_path), quantization=asked, packed=False)
        assert opened.dtype == torch.float32
        assert torch.equal(logits(opened), logits(own))
    other = next(each for each in QUANTIZATIONS if each != kind)
    with pytest.raises(InputError, match=f"is quantised already, to {kind}; set it to null"):
        load_target(str(tmp_path), quantization=other)
