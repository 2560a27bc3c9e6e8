"""Medusa heads as a drafter: exact, and its tree is the one of the most accurate guesses."""

import heapq
from math import prod

import pytest
import torch
from tests.commands import refused
from tests.speculators.test_medusa import heads_of
from tests.tiny import save_tiny_target, tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.medusa import Medusa, MedusaSession
from slipstream.drafters.streaming import Streaming
from slipstream.speculators.checkpoint import save_speculator
from slipstream.speculators.medusa import MedusaSpeculator
from slipstream.targets.loading import load_target

PROMPTS = [[3, 17, 5, 29, 11, 8], [7], [1, 2, 3, 1, 2, 3, 1, 2]]
SEEDS = [4, 5, 6]


def knowing_heads(target) -> MedusaSpeculator:
    """Heads that are often right: fitted to what the target says on these prompts."""
    speculator = heads_of(target, num_heads=3, num_ranks=5)
    with torch.no_grad():
        for head in speculator.heads:
            head.weight.copy_(target.head.weight)
    decoder, states, ahead = PlainDecoder(target, Sampling(), Limits(24)), [], []
    for prompt in PROMPTS:
        ids = prompt + decoder.generate(prompt).ids
        hidden = target.model.model(torch.tensor([ids])).last_hidden_state[0]
        states.append(hidden[len(prompt) - 1 : -4])
        ahead.append(torch.tensor(ids).unfold(0, 5, 1)[len(prompt) - 1 :, 2:])
    states, ahead = torch.cat(states), torch.cat(ahead)
    optimizer = torch.optim.Adam(speculator.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        logits = speculator.logits(target, states)
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), ahead.flatten()).backward()
        optimizer.step()
    return speculator


@pytest.fixture(scope="module")
def target():
    return tiny_target()


@pytest.fixture(scope="module")
def speculator(target):
    return knowing_heads(target)


@pytest.mark.parametrize("budget", [1, 2, 12])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=5)])
def test_answers_are_those_of_plain_decoding(target, speculator, budget, sampling):
    """Greedy, and sampled with the same seed; alone and in a batch."""
    limits = Limits(24)
    plain = PlainDecoder(target, sampling, limits)
    engine = Engine(target, Medusa(speculator), sampling, limits, budget)
    expected = [plain.generate(p, seed=s).ids for p, s in zip(PROMPTS, SEEDS, strict=True)]
    alone = [engine.generate(p, seed=s) for p, s in zip(PROMPTS, SEEDS, strict=True)]
    assert [each.ids for each in alone] == expected
    assert [each.ids for each in engine.generate_batch(PROMPTS, SEEDS)] == expected
    if budget > 2 and sampling.greedy:
        assert all(each.statistics.tau > 2 for each in alone)


def test_the_tree_is_that_of_the_most_accurate_paths(target, speculator, monkeypatch):
    """Against a heap over all paths of ranks, as the paper grows it."""
    accuracies = torch.rand(3, 5, generator=torch.Generator().manual_seed(1)).double()
    speculator.accuracies.copy_(accuracies)
    trees, draft = [], MedusaSession.draft

    def watched(session, verified, budget):
        trees.append(draft(session, verified, budget))
        return trees[-1]

    monkeypatch.setattr(MedusaSession, "draft", watched)
    Engine(target, Medusa(speculator), Sampling(), Limits(24), 9).generate(PROMPTS[0])
    accuracies = accuracies.float().tolist()
    heap, expected = [(-1.0, ())], []
    while len(expected) < 9:
        value, path = heapq.heappop(heap)
        expected.append((-value, len(path)))
        if len(path) < 3:
            for rank in range(5):
                product = prod(own[r] for own, r in zip(accuracies, (*path, rank), strict=False))
                heapq.heappush(heap, (-product, (*path, rank)))
    found = zip(trees[0].confidences[0].tolist(), trees[0].depths[0].tolist(), strict=True)
    for (product, depth), (other, other_depth) in zip(sorted(found), sorted(expected), strict=True):
        assert product == pytest.approx(other, rel=1e-5) and depth == other_depth


def test_it_opens_by_its_folder(tmp_path):
    target = load_target(str(save_tiny_target(tmp_path / "target")), device="cpu", packed=False)
    speculator = heads_of(target).float()
    folder = save_speculator(tmp_path / "medusa", speculator, target, 9, "# A")
    settings = Sampling(), Limits(16), 8
    one, other = (
        Engine(target, Medusa(given), *settings).generate(PROMPTS[0])
        for given in (speculator, folder)
    )
    assert one.ids == other.ids == PlainDecoder(target, *settings[:2]).generate(PROMPTS[0]).ids
    assert one.statistics.tau == other.statistics.tau


def test_another_kind_is_refused(target):
    text = refused(lambda: Medusa(tiny_speculator(target)).attach(target))
    assert "must be a MedusaSpeculator" in text and "a StreamingSpeculator was given" in text


def test_its_folder_is_no_streaming_speculator(target, tmp_path):
    folder = save_speculator(tmp_path / "made", heads_of(target).float(), target, 9, "# A")
    text = refused(lambda: Streaming(folder, "auto", 4).attach(target))
    assert text.startswith("speculator: ") and "'medusa'" in text
    assert "name a folder that train.py speculator=streaming wrote" in text
