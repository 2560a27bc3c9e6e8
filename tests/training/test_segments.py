"""Segments against the dense reference, and the dense reference against single rows."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from tests.tiny import ARCHITECTURES, tiny_speculator, tiny_target

from slipstream.core.masks import causal_mask
from slipstream.data.batches import Batch, collate
from slipstream.data.rendering import Sample
from slipstream.speculators.streaming.pairs import PairScores
from slipstream.training.segments import StreamLosses, lossless_losses, shared_losses
from slipstream.training.stream_labels import NO_LABEL, stream_labels

ALPHAS = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
CASES = list(product(sorted(ARCHITECTURES), ("lossless", "shared")))


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


def losses_of(target, speculator, batch: Batch, num_segments: int | None) -> StreamLosses:
    adapted = speculator.adapted(target)
    if speculator.config.mode == "shared":
        return shared_losses(adapted, speculator, batch, 0.7, ALPHAS, num_segments)
    return lossless_losses(adapted, speculator, batch, ALPHAS, num_segments)


def gradients_of(losses: StreamLosses, speculator) -> dict[str, torch.Tensor]:
    speculator.zero_grad()
    losses.total.backward()
    return {name: p.grad.clone() for name, p in speculator.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("architecture", "mode"), CASES)
@pytest.mark.parametrize("num_segments", [1, 2, 5, 12])
def test_segments_equal_the_dense_reference(architecture, mode, num_segments):
    target, speculator = pair(architecture, mode)
    batch = ragged_batch()
    dense = losses_of(target, speculator, batch, None)
    parts = losses_of(target, speculator, batch, num_segments)
    for name in ("total", "main", "pruning", "streams", "pairs", "accuracies"):
        torch.testing.assert_close(getattr(parts, name), getattr(dense, name), rtol=0, atol=1e-10)
    expected, found = gradients_of(dense, speculator), gradients_of(parts, speculator)
    assert expected.keys() == found.keys() == dict(speculator.named_parameters()).keys()
    assert all(gradient.abs().max() > 1e-6 for gradient in expected.values())
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-10)


@pytest.mark.parametrize(("architecture", "mode"), CASES)
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
        labels = stream_labels(alone, gamma)
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
                        before = alone.ids[0, position + 1 + stream].expand(stream + 1, 1)
                        every = torch.arange(len(line)).expand(stream + 1, -1)
                        text = alone.ids[0, : position + 2]
                        line = line + scores(before, every, text)[stream, 0]
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


def test_float32_agrees_to_1e_5():
    for mode in ("lossless", "shared"):
        target, speculator = pair("llama", mode)
        target.model.float()
        speculator.adapted(target).model.float()
        speculator.float()
        dense = losses_of(target, speculator, ragged_batch(), None)
        parts = losses_of(target, speculator, ragged_batch(), 4)
        expected, found = gradients_of(dense, speculator), gradients_of(parts, speculator)
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_no_gradients_are_taken_where_none_are_wanted():
    target, speculator = pair("llama", "lossless")
    with torch.no_grad():
        losses = losses_of(target, speculator, ragged_batch(), 3)
    assert not losses.total.requires_grad
    assert F.relu(losses.streams).equal(losses.streams)
