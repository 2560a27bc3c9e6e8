"""Segments against the dense reference, and the dense reference against single rows."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tests.decoding.options import DOUBLED, OPTIONS, next_token_logits
from tests.exhaustive import sparing
from tests.tiny import ARCHITECTURES, tiny_speculator, tiny_target

from slipstream.core.masks import causal_mask
from slipstream.data.batches import Batch, collate
from slipstream.data.rendering import Sample
from slipstream.speculators import losses as head_losses
from slipstream.speculators.losses import NO_LABEL, future_tokens
from slipstream.speculators.streaming.losses import StreamLosses
from slipstream.speculators.streaming.pairs import PairScores
from slipstream.speculators.streaming.segments import lossless_losses, shared_losses

ALPHAS = torch.tensor([0.5, 1.25, 2.0], dtype=torch.float64)
MODES = "lossless", "shared"
CASES = list(product(sorted(ARCHITECTURES), MODES))
SHARED_ONCE = "paper", "many", "attended_3", "rotated_values", "pair_scores"


def one_mode(architecture: str, mode: str) -> bool:
    """Both modes of the Llama, of the other families one each."""
    return architecture == "llama" or mode == MODES[sorted(ARCHITECTURES).index(architecture) % 2]


def ragged_batch() -> Batch:
    """Prompts of 1, 6 and 3 tokens, answers of 9, 2 and 12."""
    generator = torch.Generator().manual_seed(3)
    samples = []
    for prompt, answer in ((1, 9), (6, 2), (3, 12)):
        ids = torch.randint(0, 40, (prompt + answer,), generator=generator).tolist()
        samples.append(Sample(ids, prompt))
    return collate(samples)


def pair(architecture: str, mode: str):
    target = tiny_target(architecture)
    own = (
        dict(root_rank=2, transition_rank=2, copy_scores=True)
        if mode == "lossless"
        else dict(pruning_layer=3)
    )
    return target, tiny_speculator(target, mode=mode, **own)


def losses_of(
    target, speculator, batch: Batch, num_segments: int | None, **lossless
) -> StreamLosses:
    adapted = speculator.adapted(target)
    alphas = torch.linspace(0.5, 2.0, speculator.num_streams).to(speculator.pruning.up)
    if speculator.config.mode == "shared":
        return shared_losses(adapted, speculator, batch, 0.7, alphas, num_segments)
    return lossless_losses(adapted, speculator, batch, alphas, num_segments, **lossless)


def gradients_of(losses: StreamLosses, speculator) -> dict[str, torch.Tensor]:
    speculator.zero_grad()
    losses.total.backward()
    return {name: p.grad.clone() for name, p in speculator.named_parameters() if p.grad is not None}


def assert_same(
    parts: StreamLosses, dense: StreamLosses, speculator, tolerance: float = 1e-10
) -> None:
    """All losses, and the gradients of all of the speculator."""
    for name in ("total", "main", "pruning", "streams", "pairs", "accuracies"):
        found, expected = getattr(parts, name), getattr(dense, name)
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
    expected, found = gradients_of(dense, speculator), gradients_of(parts, speculator)
    assert expected.keys() == found.keys() == dict(speculator.named_parameters()).keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 1e-6, name
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("architecture", "mode", "num_segments"),
    sparing(
        [(*case, number) for case in CASES for number in (1, 2, 5, 12)],
        lambda architecture, mode, number: (
            one_mode(architecture, mode)
            and number in ((1, 12) if architecture == "llama" else (5,))
        ),
    ),
)
def test_segments_equal_the_dense_reference(architecture, mode, num_segments):
    target, speculator = pair(architecture, mode)
    batch = ragged_batch()
    dense = losses_of(target, speculator, batch, None)
    assert_same(losses_of(target, speculator, batch, num_segments), dense, speculator)


@pytest.mark.parametrize(
    ("architecture", "mode", "name"),
    sparing(
        [("llama", mode, name) for mode, options in OPTIONS.items() for name in options]
        + [(*case, "many") for case in CASES if case[0] != "llama"],
        lambda architecture, mode, name: (
            architecture == "llama"
            and (name in SHARED_ONCE if mode == "shared" else name not in DOUBLED)
        ),
    ),
)
def test_segments_equal_the_dense_reference_for_every_option(architecture, mode, name):
    target, batch = tiny_target(architecture), ragged_batch()
    speculator = tiny_speculator(target, mode=mode, **OPTIONS[mode][name])
    dense = losses_of(target, speculator, batch, None)
    assert_same(losses_of(target, speculator, batch, 4), dense, speculator)


@pytest.mark.parametrize(("name",), sparing(zip(OPTIONS["shared"]), SHARED_ONCE.__contains__))
def test_the_main_stream_is_trained_as_it_decodes(name):
    """Shared mode: the loss of main rows is that of decoding the text, one token per forward."""
    target = tiny_target()
    speculator = tiny_speculator(target, mode="shared", **OPTIONS["shared"][name])
    ids, prompt = torch.randint(0, 40, (11,), generator=torch.Generator().manual_seed(4)), 4
    losses = losses_of(target, speculator, collate([Sample(ids.tolist(), prompt)]), None)
    expected = [
        F.cross_entropy(
            next_token_logits(target, speculator, ids[None, :known], prompt)[0], ids[known]
        )
        for known in range(prompt, len(ids))
    ]
    torch.testing.assert_close(losses.main, torch.stack(expected).mean(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("mode", "num_segments"),
    sparing(product(MODES, (1, 3, 30)), lambda mode, num_segments: num_segments == 3),
)
def test_segments_equal_the_dense_reference_for_several_answers(mode, num_segments):
    """Answers of 3 and 5 tokens, 6 apart; of 4, 2 and 1, right after one another; and one."""
    generator = torch.Generator().manual_seed(4)
    samples = [
        Sample(torch.randint(0, 40, (length,), generator=generator).tolist(), prompt, earlier)
        for length, prompt, earlier in (
            (16, 11, ((2, 5),)),
            (12, 11, ((2, 6), (7, 9))),
            (9, 4, ()),
        )
    ]
    target, speculator = pair("llama", mode)
    batch = collate(samples)
    dense = losses_of(target, speculator, batch, None)
    assert_same(losses_of(target, speculator, batch, num_segments), dense, speculator)


@pytest.mark.parametrize(
    ("mode", "name", "num_segments"),
    sparing(
        [
            (mode, name, number)
            for mode in OPTIONS
            for name in OPTIONS[mode]
            for number in (None, 4)
        ],
        lambda mode, name, number: number == 4 and name in ("paper", "many"),
    ),
)
def test_layers_that_run_again_change_nothing(mode, name, num_segments):
    target, batch = tiny_target("llama"), ragged_batch()
    speculator = tiny_speculator(target, mode=mode, **OPTIONS[mode][name])
    kept = losses_of(target, speculator, batch, num_segments)
    expected = gradients_of(kept, speculator)
    adapted, calls = speculator.adapted(target), []
    adapted.checkpointing = True
    adapted.family.layers[-1].register_forward_pre_hook(lambda *_: calls.append(1))
    again = losses_of(target, speculator, batch, num_segments)
    before = len(calls)
    found = gradients_of(again, speculator)
    assert len(calls) > before or (mode, num_segments) == ("lossless", 4)  # it has run already
    torch.testing.assert_close(again.total, kept.total, rtol=0, atol=1e-12)
    for part, gradient in expected.items():
        torch.testing.assert_close(found[part], gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("unknown", [[True, False, True], [False, True, False]])
def test_segments_equal_the_dense_reference_where_roots_are_unknown(unknown):
    target, speculator = pair("llama", "lossless")
    batch, unknown = ragged_batch(), torch.tensor(unknown)
    told = losses_of(target, speculator, batch, None)
    dense = losses_of(target, speculator, batch, None, unknown_roots=unknown)
    assert (told.streams - dense.streams).abs().max() > 1e-5
    assert_same(losses_of(target, speculator, batch, 4, unknown_roots=unknown), dense, speculator)


def test_unknown_roots_are_those_of_a_speculator_without_them():
    target, speculator = pair("llama", "lossless")
    unknown = torch.ones(3, dtype=torch.bool)
    untold = losses_of(target, speculator, ragged_batch(), 4, unknown_roots=unknown)
    speculator.root = None
    assert_same(untold, losses_of(target, speculator, ragged_batch(), 4), speculator)


def counted(monkeypatch, target) -> list[int]:
    """How many rows have logits at a time, from now on no more than 7."""
    calls, cross_entropy = [], F.cross_entropy

    def count(logits, *others, **options):
        calls.append(len(logits))
        return cross_entropy(logits, *others, **options)

    monkeypatch.setattr(head_losses.F, "cross_entropy", count)
    monkeypatch.setattr(head_losses, "SLICE_BYTES", {"cpu": 4 * 7 * target.vocab_size})
    return calls


@pytest.mark.parametrize(
    ("architecture", "mode"), sparing(CASES, lambda architecture, mode: architecture == "llama")
)
def test_logits_of_a_few_rows_at_a_time_change_nothing(architecture, mode, monkeypatch):
    """All other tests here have all of them at once."""
    target, speculator = pair(architecture, mode)
    batch = ragged_batch()
    whole = losses_of(target, speculator, batch, None)
    calls = counted(monkeypatch, target)
    assert_same(losses_of(target, speculator, batch, 4), whole, speculator)
    assert len(calls) > 4 and max(calls) == 7


@pytest.mark.parametrize(
    ("mode", "num_segments"),
    sparing(
        product(OPTIONS, (None, 2)), lambda mode, number: (mode == "shared") == (number is None)
    ),
)
def test_scores_of_pairs_a_few_rows_at_a_time_change_nothing(mode, num_segments, monkeypatch):
    target, batch = tiny_target("llama"), ragged_batch()
    speculator = tiny_speculator(target, mode=mode, **OPTIONS[mode]["pair_scores"])
    whole = losses_of(target, speculator, batch, None)
    calls = counted(monkeypatch, target)
    assert_same(losses_of(target, speculator, batch, num_segments), whole, speculator)
    assert len(calls) > 4 and max(calls) == 7


@pytest.mark.parametrize(("architecture", "mode"), sparing(CASES, one_mode))
def test_the_dense_reference_equals_one_sample_at_a_time_and_explicit_masks(architecture, mode):
    """Written out again for single samples: Eq. 1 to 4 as one mask over all rows, Eq. 6 as sums."""
    target, speculator = pair(architecture, mode)
    batch, adapted = ragged_batch(), speculator.adapted(target)
    shared, gamma = mode == "shared", speculator.num_streams
    main_loss, counts = 0.0, [0] * gamma
    stream_losses, pair_losses = [0.0] * gamma, [0.0] * gamma
    rows_used = 0
    for row, length in enumerate(batch.lengths.tolist()):
        alone = collate(
            [Sample(batch.ids[row, :length].tolist(), int(batch.supervised[row].int().argmax()))]
        )
        labels = future_tokens(alone, gamma)
        positions = labels.positions[0]
        everywhere = torch.arange(length)[None]
        rows = adapted.embed(alone.ids[:, :length], everywhere, causal_mask(length)[None, None])
        rows = adapted.run_layers(range(speculator.first_layer), rows, None)
        starts = rows.hidden[:, positions]
        if speculator.root is not None:
            roots = target.token_embeddings(labels.next_tokens)
            starts = starts + speculator.root(F.rms_norm(roots, roots.shape[-1:]))
        streams = starts.unsqueeze(2) + speculator.embeddings
        rows.hidden = torch.cat([rows.hidden, streams.flatten(1, 2)], 1)
        shifts = torch.arange(1, gamma + 1)
        rows.positions = torch.cat([everywhere, (positions[:, None] + shifts).view(1, -1)], 1)
        rows.mask = explicit_mask(length, positions.tolist(), gamma, shared)[None, None]
        rows.num_stream_rows = rows.hidden.shape[1] - length
        with speculator.acting_on(adapted, rows):
            hidden = adapted.run_layers(speculator.msa_layers(adapted), rows, None).hidden
        raw = adapted.logits(hidden)[0]
        logits = raw.log_softmax(-1)
        for place, position in enumerate(positions.tolist()):
            token = int(labels.next_tokens[0, place])
            main_loss, rows_used = main_loss - logits[position, token], rows_used + 1
            for stream in range(gamma):
                token = int(labels.tokens[0, place, stream])
                if token != NO_LABEL:
                    line = raw[length + place * gamma + stream]
                    stream_losses[stream] -= line.log_softmax(-1)[token].detach()
                    if speculator.scores_pairs:
                        scores = PairScores(target, speculator.transitions, speculator.copying)
                        before = alone.ids[0, position + 1 + stream].expand(1, stream + 1, 1)
                        every = torch.arange(len(line)).expand(1, stream + 1, -1)
                        text = alone.ids[:, : position + 2]
                        line = line + scores(before, every, text)[0, stream, 0]
                        pair_losses[stream] -= line.log_softmax(-1)[token].detach()
                    counts[stream] += 1
    dense = losses_of(target, speculator, batch, None)
    for found, expected in ((dense.streams, stream_losses), (dense.pairs, pair_losses)):
        means = [loss / count for loss, count in zip(expected, counts, strict=True)]
        torch.testing.assert_close(found, torch.tensor(means).to(found), rtol=0, atol=1e-10)
    if shared:
        torch.testing.assert_close(dense.main, (main_loss / rows_used).detach(), rtol=0, atol=1e-10)
    weighted = (ALPHAS * (dense.streams + dense.pairs)).sum() + dense.pruning + 0.7 * dense.main
    torch.testing.assert_close(dense.total.detach(), weighted, rtol=0, atol=1e-10)


def explicit_mask(length: int, positions: list[int], gamma: int, shared: bool) -> torch.Tensor:
    """Row by row, as the equations say it: who sees whom."""
    total = length + len(positions) * gamma
    mask = torch.zeros(total, total, dtype=torch.bool)
    for row in range(length):
        mask[row, : row + 1] = True
        if shared and row in positions:
            start = length + positions.index(row) * gamma
            mask[row, start : start + gamma] = True
    for place, position in enumerate(positions):
        start = length + place * gamma
        for stream in range(gamma):
            mask[start + stream, : position + 1] = True
            mask[start + stream, start : start + stream + 1] = True
    return mask


@pytest.mark.parametrize(
    ("architecture", "mode"),
    sparing(
        product(["gpt2", "llama"], OPTIONS),
        lambda architecture, mode: (architecture == "llama") == (mode == "lossless"),
    ),
)
def test_float32_agrees_to_1e_5(architecture, mode):
    target, speculator = pair(architecture, mode)
    target.model.float()
    speculator.adapted(target).model.float()
    speculator.float()
    dense = losses_of(target, speculator, ragged_batch(), None)
    parts = losses_of(target, speculator, ragged_batch(), 4)
    assert parts.total.dtype == parts.streams.dtype == torch.float32
    assert_same(parts, dense, speculator, tolerance=1e-5)


def test_no_gradients_are_taken_where_none_are_wanted():
    target, speculator = pair("llama", "lossless")
    with torch.no_grad():
        losses = losses_of(target, speculator, ragged_batch(), 3)
    assert not losses.total.requires_grad
    assert F.relu(losses.streams).equal(losses.streams)
