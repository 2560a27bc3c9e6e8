"""Greedy output of every drafter equals transformers' own, token for token, in float64."""

import pytest
import torch
from slipstream.core.tree import DraftTree
from tests.drafters import untrained
from tests.tiny import ARCHITECTURES, VOCABULARY, random_tree, tiny_speculator, tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding import decoder
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.base import Context, Drafter
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming

NUM_TOKENS = 24


class RandomTrees(Drafter):
    """Proposes random trees that now and then hold the truth, and repeated siblings."""

    def __init__(self, truth: list[int], seed: int):
        self.truth = truth
        self.generator = torch.Generator().manual_seed(seed)

    def propose(self, contexts: list[Context], budget: int) -> list[DraftTree]:
        return [self._tree(context, budget) for context in contexts]

    def _tree(self, context: Context, budget: int) -> DraftTree:
        tree = random_tree(
            int(torch.randint(1, budget + 1, (), generator=self.generator)), self.generator
        )
        tree.tokens[0] = context.tokens[-1]
        done = len(context.tokens)
        for node, depth in enumerate(tree.depths()):
            if depth and torch.rand((), generator=self.generator) < 0.7:
                tree.tokens[node] = self.truth[min(done + depth - 1, len(self.truth) - 1)]
        deep = [node for node, depth in enumerate(tree.depths()) if depth <= context.max_depth]
        return tree.keep(deep)


def reference(target, prompt: list[int], count: int = NUM_TOKENS) -> list[int]:
    """Greedy tokens of transformers' `generate`, for a target that never ends by itself."""
    output = target.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
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


def drafters(target, truth):
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


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_every_drafter_gives_the_greedy_tokens_of_generate(architecture):
    target = tiny_target(architecture)
    taus = {}
    for prompt in prompts(seed=3):
        truth = reference(target, prompt)
        assert PlainDecoder(target, Sampling(), Limits(NUM_TOKENS)).generate(prompt).ids == truth
        for name, drafter in drafters(target, prompt + truth):
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


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("architecture", ["gpt_neo", "llama", "opt"])
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
    for name, drafter in drafters(target, batch[0] + alone[0].ids):
        engine = Engine(target, drafter, Sampling(), limits, budget=9)
        answers = engine.generate_batch(batch)
        assert [answer.ids for answer in answers] == [a.ids for a in alone], name
        assert [a.finished for a in answers] == [a.finished for a in alone], name


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(1.0, top_k=5, top_p=0.9)])
def test_sampled_answers_of_a_batch_are_those_alone_with_the_same_seeds(sampling):
    target = tiny_target("llama")
    batch, limits, seeds = batch_of(4), Limits(NUM_TOKENS), [11, 12, 13, 11]
    engines = {"plain": PlainDecoder(target, sampling, limits)}
    for name, drafter in drafters(target, [1, 2, 3]):
        # A batch is not pruned; random trees come from one generator for all; drafters that learn
        # from earlier answers spend other randomness on later ones.
        if not any(word in name for word in ("pruned", "random_trees", "combined", "kept")):
            engines[name] = Engine(target, drafter, sampling, limits, budget=9)
    for name, engine in engines.items():
        alone = [engine.generate(*pair).ids for pair in zip(batch, seeds, strict=True)]
        assert [answer.ids for answer in engine.generate_batch(batch, seeds)] == alone, name
