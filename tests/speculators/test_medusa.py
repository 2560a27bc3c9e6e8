"""Medusa heads: the paper's equations, written out, and the accuracies that choose the tree."""

import pytest
import torch
import torch.nn.functional as F
from tests.commands import refused
from tests.tiny import VOCABULARY, tiny_target

from slipstream.data.batches import collate
from slipstream.data.rendering import Sample
from slipstream.speculators.medusa import MedusaConfig, MedusaSpeculator

SAMPLES = [Sample([5, 9, 5, 9, 7, 5, 11], 3), Sample([4, 8, 4, 8, 8, 1, 2, 30, 6], 5)]


def heads_of(target, seed: int = 0, **arguments) -> MedusaSpeculator:
    """Two heads, far from zero."""
    torch.manual_seed(seed)
    config = MedusaConfig(**dict(num_heads=2, num_ranks=4) | arguments)
    speculator = MedusaSpeculator(target, config).double()
    for parameter in speculator.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return speculator


def guesses(target, speculator) -> list[tuple[int, torch.Tensor, int]]:
    """(head, (V,) logits, token) of everything there is to guess, one token at a time."""
    found = []
    for sample in SAMPLES:
        states = target.model.model(torch.tensor([sample.ids])).last_hidden_state[0]
        for end in range(sample.prompt_length - 1, len(sample.ids)):
            for number, block in enumerate(speculator.blocks):
                ahead = end + 2 + number
                if ahead < len(sample.ids):
                    state = states[end] + F.silu(block.weight @ states[end] + block.bias)
                    head = target.head if speculator.heads is None else speculator.heads[number]
                    found.append((number, head.weight @ state, sample.ids[ahead]))
    return found


@pytest.mark.parametrize("own_heads", [True, False])
@pytest.mark.parametrize("num_segments", [None, 1, 3])
def test_the_loss_is_that_of_single_guesses(own_heads, num_segments):
    """Head k counts 0.7^k; segments change neither the loss nor a gradient."""
    target = tiny_target()
    speculator = heads_of(target, own_heads=own_heads, decay=0.7)
    loss, means = speculator.losses(target, collate(SAMPLES), num_segments=num_segments)
    found = torch.autograd.grad(loss, list(speculator.parameters()))
    single = guesses(target, speculator)
    losses = [
        torch.stack([
            F.cross_entropy(logits, torch.tensor(token))
            for number, logits, token in single if number == head
        ]).mean()
        for head in range(2)
    ]  # fmt: skip
    expected = 0.7 * losses[0] + 0.49 * losses[1]
    torch.testing.assert_close(loss, expected, rtol=0, atol=1e-10)
    for name, mean in (("loss_head_1", losses[0]), ("loss_head_2", losses[1])):
        torch.testing.assert_close(means[name], mean.detach(), rtol=0, atol=1e-10)
    wanted = torch.autograd.grad(expected, list(speculator.parameters()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_new_heads_repeat_the_target():
    target = tiny_target()
    speculator = MedusaSpeculator(target, MedusaConfig()).double()
    hidden = torch.randn(3, target.hidden_size, dtype=torch.float64)
    logits = speculator.logits(target, target.norm(hidden))
    expected = target.logits(hidden)[:, None].expand(-1, 4, -1)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12)
    assert not any(p.requires_grad for p in target.model.parameters())


def test_accuracies_are_shares_of_right_guesses():
    target, ranks = tiny_target(), VOCABULARY
    speculator = heads_of(target, num_ranks=ranks)
    speculator.calibrate(target, [collate(SAMPLES[:1]), collate(SAMPLES[1:])])
    right, counts = torch.zeros(2, ranks), torch.zeros(2, 1)
    for number, logits, token in guesses(target, speculator):
        right[number, logits.argsort(descending=True).tolist().index(token)] += 1
        counts[number] += 1
    torch.testing.assert_close(speculator.accuracies.float(), right / counts)
    assert speculator.accuracies.sum(1).tolist() == pytest.approx([1, 1])


@pytest.mark.parametrize(
    "arguments", [dict(num_heads=0), dict(num_ranks=1.5), dict(decay=0), dict(own_heads="yes")]
)
def test_settings_out_of_range_are_refused(arguments):
    text = refused(lambda: MedusaConfig(**arguments))
    assert text.startswith(f"speculator.{next(iter(arguments))}: ")


def test_more_ranks_than_tokens_are_refused():
    text = refused(lambda: MedusaSpeculator(tiny_target(), MedusaConfig(num_ranks=41)))
    assert text.startswith("speculator.num_ranks: ") and "40" in text


def test_a_head_that_cannot_be_copied_is_refused():
    target = tiny_target()
    target.model.lm_head = torch.nn.Sequential(target.head)
    target.model.lm_head.in_features = target.hidden_size
    text = refused(lambda: MedusaSpeculator(target, MedusaConfig()))
    assert text.startswith("speculator.own_heads: ") and "false" in text
    MedusaSpeculator(target, MedusaConfig(own_heads=False))
