"""Greedy output of every drafter equals transformers' own, token for token, in float64.

Sampled output of every drafter whose trees are not drawn is that of plain sampling.
"""

import pytest
import torch
from tests.decoding.options import one_number_for_two_depths
from tests.drafters import untrained
from tests.exhaustive import sparing
from tests.reference import DraftTree
from tests.tiny import ARCHITECTURES, VOCABULARY, random_tree, tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding import decoder
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.base import AttachedHost, Drafter, Request
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming

NUM_TOKENS = 24


class RandomTrees(Drafter):
    """Proposes random trees that now and then hold the truth, and repeated siblings."""

    def __init__(self, truth: list[int], seed: int):
        self.truth = truth
        self.generator = torch.Generator().manual_seed(seed)

    def attach(self, target) -> "AttachedRandomTrees":
        return AttachedRandomTrees(target, self)

    def tree(self, request: Request, budget: int) -> DraftTree:
        tree = random_tree(
            int(torch.randint(1, budget + 1, (), generator=self.generator)), self.generator
        )
        tree.tokens[0] = request.tokens[-1]
        done = len(request.tokens)
        for node, depth in enumerate(tree.depths()):
            if depth and torch.rand((), generator=self.generator) < 0.7:
                tree.tokens[node] = self.truth[min(done + depth - 1, len(self.truth) - 1)]
        room = max(1, request.room)  # none where this token is the last
        return tree.keep([node for node, depth in enumerate(tree.depths()) if depth < room])


class AttachedRandomTrees(AttachedHost):
    def drafted(self, request: Request, state: None, budget: int) -> DraftTree:
        return self.settings.tree(request, budget)


def reference(target, prompt: list[int], count: int = NUM_TOKENS) -> list[int]:
    """Greedy tokens of transformers' `generate`, for a target that never ends by itself."""
    ids = torch.tensor([prompt], device=target.device)
    output = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()


def prompts(seed: int, count: int = 3) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()
        for length in range(1, 1 + 4 * count, 4)
    ]


def telling(name: str) -> bool:
    """Of pruned streams and of rules for the length some: each option is proven pruned in
    test_every_option.py, what rules do in test_draft_length.py."""
    if name.endswith("_pruned"):
        return "_0_" in name
    rule = name.rpartition(", ")[2]
    return rule not in untrained.STREAM_RULES or rule in ("heuristic", "adaedl")


def drafters(target, truth, every: bool):
    """By name; all, or those that are telling."""
    found = every_drafter(target, truth)
    return found if every else (each for each in found if telling(each[0]))


def every_drafter(target, truth):
    yield from untrained.untrained([truth, truth[::-1]]).items()
    yield from untrained.with_rules(target, tiny_speculator(target), top_k=3).items()
    yield "draft_model", DraftModel(tiny_target("llama", seed=5, num_hidden_layers=1), 4)
    yield "draft_model_itself", DraftModel(target, 4)
    yield "random_trees", RandomTrees(truth, seed=1)
    variants = [
        dict(),
        dict(adapter_rank=0, initialisation_rank=2),
        dict(stream_positions="same", root_rank=3),
        dict(num_msa_layers=4, num_streams=1, transition_rank=3),
        dict(transition_rank=3, copy_scores=True),
        dict(value_rotation=0.005, pruning_layer=1),
        dict(attended_tokens=3, pruning_layer=3),
    ]
    if target.family.mlp is not None:
        variants.append(dict(mlp="adapter"))
    for schedule in ("fused", "deferred"):
        for number, variant in enumerate(variants):
            speculator = tiny_speculator(target, **variant)
            yield f"{schedule}_{number}", Streaming(speculator, schedule, top_k=3)
            if number == 4:
                yield f"{schedule}_combined", untrained.combined(speculator, schedule)
            yield (
                f"{schedule}_{number}_pruned",
                Streaming(speculator, schedule, top_k=3, prune_threshold=0.02, prune_cap=5),
            )


@pytest.mark.parametrize(
    ("architecture",), sparing(zip(sorted(ARCHITECTURES)), lambda each: each == "llama")
)
def test_every_drafter_gives_the_greedy_tokens_of_generate(architecture):
    target = tiny_target(architecture)
    taus = {}
    for prompt in prompts(seed=3, count=2)[1:]:
        truth = reference(target, prompt)
        assert PlainDecoder(target, Sampling(), Limits(NUM_TOKENS)).generate(prompt).ids == truth
        every = architecture != "llama"  # of which a batch of one has all
        for name, drafter in drafters(target, prompt + truth, every):
            engine = Engine(target, drafter, Sampling(), Limits(NUM_TOKENS), budget=9)
            generation = engine.generate(prompt)
            assert generation.ids == truth, name
            taus[name] = generation.statistics.tau
    assert taus["draft_model_itself"] > 4.0
    assert taus["random_trees"] > 1.3


def batch_of(size: int) -> list[list[int]]:
    """Prompts of different lengths, the shortest in the middle."""
    generator = torch.Generator().manual_seed(size)
    lengths = [3 + (5 * place + size) % 11 for place in range(size)]
    lengths[size // 2] = 1
    return [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in lengths
    ]


SIZES = [("llama", size) for size in (1, 2, 4, 8, 16)]
SIZES += [(name, size) for name in ("gpt_neo", "opt") for size in (2, 8)]


@pytest.mark.parametrize(
    ("architecture", "size"), sparing(SIZES, lambda *each: each == ("llama", 4))
)
def test_prompts_of_a_batch_are_answered_as_alone(architecture, size, monkeypatch):
    """Answers end at different lengths, too; prompts run in parts of four rows."""
    target = tiny_target(architecture)
    batch, limits = batch_of(size), Limits(NUM_TOKENS)
    plain = PlainDecoder(target, Sampling(), limits)
    endless = [plain.generate(prompt).ids for prompt in batch]
    ends = [endless[0][17], endless[size // 2][11], endless[-1][5]]
    target.model.generation_config.eos_token_id = ends
    alone = [plain.generate(prompt) for prompt in batch]
    assert [answer.ids for answer in plain.generate_batch(batch)] == [a.ids for a in alone]
    assert len({len(answer.ids) for answer in alone}) >= min(size, 3)
    monkeypatch.setattr(decoder, "PREFILL_ROWS", 4)
    assert [answer.ids for answer in plain.generate_batch(batch)] == [a.ids for a in alone]
    every = (architecture, size) != ("llama", 4)
    for name, drafter in drafters(target, batch[0] + alone[0].ids, every):
        engine = Engine(target, drafter, Sampling(), limits, budget=9)
        answers = engine.generate_batch(batch)
        assert [answer.ids for answer in answers] == [a.ids for a in alone], name
        assert [a.finished for a in answers] == [a.finished for a in alone], name


SAMPLINGS = [(Sampling(0.7),), (Sampling(0.9, top_k=5, top_p=0.9),)]


@pytest.mark.parametrize(("sampling",), sparing(SAMPLINGS, lambda sampling: not sampling.top_k))
def test_a_seed_gives_the_answer_of_plain_sampling(sampling):
    """Whatever is drafted, in a batch; alone as well with drawn drafts, with pruned ones, which
    batches do not prune, and in the full product with all."""
    target = tiny_target("llama")
    batch, limits, seeds = batch_of(2), Limits(NUM_TOKENS), [11, 12]
    plain = PlainDecoder(target, sampling, limits)
    expected = [plain.generate(*pair).ids for pair in zip(batch, seeds, strict=True)]
    assert [answer.ids for answer in plain.generate_batch(batch, seeds)] == expected
    accepted = {}
    for name, drafter in drafters(target, batch[0] + expected[0], sampling.top_k is not None):
        engine = Engine(target, drafter, sampling, limits, budget=9)
        answers = engine.generate_batch(batch, seeds)
        found = [answer.ids for answer in answers]
        if engine.attached.draws or sampling.top_k or "pruned" in name:
            alone = [engine.generate(*pair).ids for pair in zip(batch, seeds, strict=True)]
            assert found == alone, name
        assert engine.attached.draws or found == expected, name
        accepted[name] = sum(answer.statistics.drafted for answer in answers)
    assert sum(count > 0 for count in accepted.values()) > 0.8 * len(accepted)


def test_one_number_for_two_depths_is_not_plain_sampling(monkeypatch):
    target, prompt = tiny_target("llama"), batch_of(4)[0]
    plain = PlainDecoder(target, Sampling(0.7), Limits(NUM_TOKENS)).generate(prompt, 11).ids
    one_number_for_two_depths(monkeypatch)
    engine = Engine(target, RandomTrees(prompt + plain, 1), Sampling(0.7), Limits(NUM_TOKENS), 9)
    assert engine.generate(prompt, 11).ids != plain
