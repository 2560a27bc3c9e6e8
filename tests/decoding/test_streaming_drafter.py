"""How streams become a tree."""

import time

import pytest
import torch
from tests.decoding.options import Watched
from tests.tiny import VOCABULARY, tiny_speculator, tiny_target

from slipstream.core.errors import InputError
from slipstream.core.sampling import Sampling
from slipstream.data.rendering import render_prompt
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.statistics import Statistics
from slipstream.drafters.streaming import AttachedStreaming, Streaming
from slipstream.evaluation.prompts import PromptSets
from slipstream.speculators.streaming.pairs import pair_tables
from slipstream.targets.loading import load_target


@pytest.fixture(scope="module")
def drafter() -> AttachedStreaming:
    target = tiny_target()
    speculator = tiny_speculator(target, transition_rank=3, copy_scores=True)
    return Streaming(speculator, "deferred", VOCABULARY).attach(target)


def candidates(drafter: AttachedStreaming, text: list[int], logits: torch.Tensor):
    """Tokens of each level, and (places, probabilities) of the children of each one above."""
    root, texts = torch.tensor(text[-1:]), torch.tensor([[-1, *text, -1]])
    found = drafter.candidates(root, logits[None], texts, VOCABULARY)
    tokens, places, values = (tensor[0].tolist() for tensor in found)
    return tokens, [list(zip(*level, strict=True)) for level in zip(places, values, strict=True)]


@pytest.mark.parametrize("text", [[7], [5, 7, 9, 5, 30, 5, 7]])
def test_children_have_the_probabilities_of_stream_and_scores_together(drafter, text):
    """With all tokens as candidates: softmax of the stream's logits plus the parent's scores."""
    logits = torch.randn(3, VOCABULARY, dtype=torch.float64)
    tokens, children = candidates(drafter, text, logits)
    every = torch.arange(VOCABULARY)
    texts, lengths = torch.tensor([text] * VOCABULARY), torch.full((VOCABULARY,), len(text))
    target, transitions = drafter.target, drafter.speculator.transitions
    copying = drafter.speculator.copying
    following, *terms = pair_tables(target, transitions, copying)
    none = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    scores = []
    for stream in range(3):
        own = transitions.add_to(none.clone(), target, every, following)
        streams = torch.full((VOCABULARY,), stream)
        of_tokens = (table.squeeze(1) for table in terms)
        scores.append(copying.add_to(own, *of_tokens, streams, every, texts, lengths))
    assert scores[0].std() > 0.1
    for level in range(3):
        parents = [7] if level == 0 else tokens[level - 1]
        for place, parent in enumerate(parents):
            expected = (logits[level] + scores[level][parent]).softmax(-1)
            found = {
                tokens[level][child]: p for child, p in zip(*children[level][place], strict=True)
            }
            assert list(found.values()) == sorted(found.values(), reverse=True)
            assert [found[token] for token in range(VOCABULARY)] == pytest.approx(
                expected.tolist(), abs=1e-6
            )


def test_tokens_that_are_no_candidates_keep_their_share(drafter):
    narrow = Streaming(drafter.speculator, "deferred", top_k=1).attach(drafter.target)
    logits = 3 * torch.randn(2, VOCABULARY, dtype=torch.float64)
    tokens, children = candidates(narrow, [7], logits)
    assert [len(level) for level in tokens] == [8, 8]
    probabilities = logits.softmax(-1)
    every = torch.arange(VOCABULARY).expand(2, -1)
    above = [[7] * 8, tokens[0]]
    scores = narrow.pairs(torch.tensor([above]), every[None], torch.tensor([[7]]))[0].detach()
    for level in range(2):
        for place, (chosen, values) in enumerate(children[level]):
            weights = probabilities[level] * scores[level, place].exp()
            named = weights[tokens[level]]
            rest = 1 - probabilities[level, tokens[level]].sum()
            assert chosen == [int(named.argmax())]
            assert values == pytest.approx([float(named.max() / (named.sum() + rest))], abs=1e-6)


def test_streams_that_no_level_of_the_tree_needs_do_not_run():
    prompt, answers, target = [3, 1, 4, 1, 5], [], tiny_target()
    speculator = tiny_speculator(target, num_streams=4, transition_rank=2, copy_scores=True)
    for schedule in ("fused", "deferred"):
        for count in (2, 4):
            drafter = Watched(speculator, schedule, top_k=2)
            attached = drafter.attach(target)
            if count == 4:
                attached.reaching = lambda _, reaching=attached.reaching: reaching(4)
            engine = Engine(target, attached, Sampling(), Limits(16), budget=3)
            generation = engine.generate(prompt)
            assert drafter.session.speculator.num_streams == count
            answers.append((generation.ids, [tree.tokens for tree in drafter.proposed]))
        assert answers[-1] == answers[-2]


def test_a_refused_target_is_refused_again():
    target = tiny_target()
    drafter = Streaming(tiny_speculator(target, mode="shared"), "deferred", 2)
    for _ in range(2):
        with pytest.raises(InputError, match="choose fused"):
            drafter.attach(target)


def test_scores_move_probability_to_the_tokens_that_follow(drafter):
    uniform = torch.full((1, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
    queries, keys = drafter.pairs.transitions
    scores = queries[11] @ keys.T
    tokens, children = candidates(drafter, [11], uniform.log())
    assert tokens[0][children[0][0][0][0]] == int(scores.argmax())


def test_large_scores_of_pairs_stay_numbers(drafter, monkeypatch):
    """Scores of which the exponential is beyond float32: the best child has all the probability."""
    logits, root, texts = torch.randn(1, 3, VOCABULARY), torch.tensor([7]), torch.tensor([[-1, 7]])
    score = drafter.pairs
    monkeypatch.setattr(drafter, "pairs", lambda *given: 1000 * score(*given).float())
    _, _, values = drafter.candidates(root, logits, texts, VOCABULARY)
    assert values.isfinite().all()
    torch.testing.assert_close(values.sum(-1), torch.ones_like(values[..., 0]))


def test_a_low_temperature_drafts_as_well_as_greedy_decoding():
    target = load_target("slipstream/small-target")
    sets = PromptSets(None, None, ["data_to_text", "text_to_sql"], "test", seed=0)
    prompts = [render_prompt(target.tokenizer, prompt.text) for prompt in sets.take(6)]
    taus = []
    for sampling in (Sampling(), Sampling(0.05)):
        drafter = Streaming("slipstream/small-streaming", "deferred", top_k=4)
        engine = Engine(target, drafter, sampling, Limits(64), budget=10)
        numbers = [engine.generate(prompt).statistics for prompt in prompts]
        taus.append(sum(numbers, Statistics()).tau)
    assert taus[1] > 0.93 * taus[0] > 2


@pytest.mark.parametrize("scored", [False, True])
def test_a_top_k_of_thousands_drafts_the_tree_of_a_smaller_one(scored):
    """A tree of N nodes has no use for more than N - 1 children of a node."""
    target = tiny_target(vocab_size=6000)
    arguments = dict(transition_rank=3, copy_scores=True) if scored else {}
    speculator, trees = tiny_speculator(target, **arguments), []
    for top_k in (40, 5000):
        drafter = Watched(speculator, "deferred", top_k)
        started = time.perf_counter()
        Engine(target, drafter, Sampling(), Limits(8), budget=6).generate([3, 1, 4])
        assert time.perf_counter() - started < 10
        trees.append([tree.tokens for tree in drafter.proposed])
    assert trees[0] == trees[1]
