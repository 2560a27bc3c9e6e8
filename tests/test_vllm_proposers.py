"""Drafters of n-grams behind vLLM's interface for proposers, beside ours, token for token; vLLM
itself (a CUDA build of gigabytes) is asked only where it is installed."""

from types import SimpleNamespace

import numpy as np
import pytest
from tests.commands import refused
from tests.tiny import tiny_target

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.prompt_lookup import AdaptiveNgram
from slipstream.drafters.prompt_lookup import PromptLookup as OurLookup
from slipstream.drafters.suffixes import SuffixStore
from slipstream.vllm_proposers import AdaptiveNgrams, PromptLookup, Rest, SuffixDecoding


def made(proposer, most=4, longest=64, **settings):
    """As vLLM makes it, from what stands in for its config."""
    return proposer(
        SimpleNamespace(
            speculative_config=SimpleNamespace(num_speculative_tokens=most),
            model_config=SimpleNamespace(max_model_len=longest, get_vocab_size=lambda: 100),
            additional_config={"slipstream": settings} if settings else {},
        )
    )


def ask(proposer, *texts):
    """As vLLM asks it for drafts after a step; None: a request whose prompt is not yet through."""
    tokens = np.full((8, 128), 99, dtype=np.int32)  # what is beyond a text is of older ones
    for row, text in enumerate(texts):
        tokens[row, : len(text or [])] = text or []
    return proposer.propose(
        sampled_token_ids=[[text[-1]] if text else [] for text in texts],
        num_tokens_no_spec=np.array([len(text or []) for text in texts]),
        token_ids_cpu=tokens,
        slot_mappings=None,
    )


def test_one_chain_for_each_request_none_for_a_prompt_not_yet_through():
    proposer = made(PromptLookup)
    assert ask(proposer, [1, 2, 3, 9, 1, 2], None, [5, 6, 7]) == [[3, 9, 1, 2], [], []]
    assert ask(made(PromptLookup, most=1), [1, 2, 3, 9, 1, 2]) == [[3]]


def test_nothing_is_drafted_beyond_the_context():
    text = [1, 2, 3, 9, 1, 2]
    for left in (2, 0):
        assert ask(made(PromptLookup, longest=len(text) + left), text) == [[3, 9][:left]]


@pytest.mark.parametrize("proposer", [PromptLookup, AdaptiveNgrams, SuffixDecoding])
def test_rows_change_hands_and_requests_leave(proposer):
    """However requests move, drafts are those of a proposer that never saw another text; and what
    was indexed is gone on with."""
    rng = np.random.default_rng(0)
    texts = {name: rng.integers(0, 4, 6 + name).tolist() for name in range(4)}
    texts[3] = list(texts[2])  # two requests with the same prompt
    shared, rows, reused = made(proposer), [0, 1, 2, 3], 0
    for step in range(12):
        before = {id(known.index) for known in shared.known.values()}
        found = ask(shared, *(texts[name] for name in rows))
        assert found == [ask(made(proposer), texts[name])[0] for name in rows]
        indices = [id(shared.known[row].index) for row in range(len(rows))]
        assert len(set(indices)) == len(rows)
        reused += sum(each in before for each in indices)
        for name in rows:
            texts[name] = texts[name] + rng.integers(0, 4, 1 + step % 3).tolist()
        rows = [rows[-1], *rows[1:-1]] if step == 5 else rows[::-1]
    assert reused == 4 * 5 + 3 * 6


def test_a_row_that_waits_keeps_its_index():
    shared, text = made(PromptLookup), [1, 2, 3, 9, 1, 2]
    ask(shared, text, [5, 6])
    known = shared.known[0].index
    ask(shared, None, [5, 6, 7])
    assert ask(shared, [*text, 3]) == [[9, 1, 2, 3]] and shared.known[0].index is known


@pytest.mark.parametrize(
    ("proposer", "drafter"),
    [(PromptLookup, OurLookup(3, 4)), (AdaptiveNgrams, AdaptiveNgram(4, 4))],
)
def test_as_many_drafts_are_accepted_as_in_our_engine(proposer, drafter):
    """A loop as vLLM has it: the target's own text decides what is kept of each chain."""
    target, prompt, limits = tiny_target(), [1, 2, 3, 1, 2, 3, 1], Limits(110)
    text = prompt + PlainDecoder(target, Sampling(), limits).generate(prompt).ids
    proposer, place, accepted = made(proposer, longest=128), len(prompt) + 1, []
    while place < len(text):
        (chain,) = ask(proposer, text[:place])
        kept = 0
        while kept < len(chain) and text[place + kept : place + kept + 1] == [chain[kept]]:
            kept += 1
        accepted.append(kept)
        place += kept + 1
    ours = Engine(target, drafter, Sampling(), limits, 5).generate(prompt)
    assert sum(accepted) > 10 and accepted[:-1] == list(ours.accepted)[:-1]


def test_a_corpus_is_drafted_from(tmp_path):
    SuffixStore.of_texts([[1, 2, 3, 4, 5], [7, 2, 3, 4, 6], [8, 3, 4, 6]]).save(tmp_path)
    proposer = made(Rest, most=2, store=str(tmp_path))
    assert ask(proposer, [9, 2, 3], [9, 1, 2], [9]) == [[4, 5], [3, 4], []]
    assert "store: is missing" in refused(lambda: made(Rest))
    assert "holds no whole store" in refused(lambda: made(Rest, store=str(tmp_path / "none")))
    SuffixStore.of_texts([[1, 100]]).save(tmp_path / "other")
    assert "beyond the 100 of" in refused(lambda: made(Rest, store=str(tmp_path / "other")))


def test_a_chain_of_suffix_decoding_is_as_long_as_the_ending_that_recurs():
    text = [1, 2, 3, 4, 5, 6, 7, 1, 2]
    assert ask(made(SuffixDecoding), text, [*text, 3]) == [[3, 4], [4, 5, 6]]
    assert ask(made(SuffixDecoding, max_ngram=1), [*text, 3]) == [[4]]


def test_settings_are_taken_and_unknown_ones_refused():
    text = [1, 2, 5, 3, 2, 6, 1, 2]
    assert ask(made(PromptLookup, most=1, max_ngram=1), text) == [[6]]
    assert ask(made(PromptLookup, most=1, max_ngram=2), text) == [[5]]
    said = refused(lambda: made(AdaptiveNgrams, ngram=2))
    assert said.startswith("additional_config.slipstream.ngram: unknown") and "max_ngram" in said
    for wrong in ("4", None, 0, True, 1.5):
        said = refused(lambda wrong=wrong: made(PromptLookup, max_ngram=wrong))
        assert said.startswith("additional_config.slipstream.max_ngram: ")


def test_vllm_makes_and_asks_it():
    pytest.importorskip("vllm", reason="vLLM is not installed: its wheel is a CUDA build")
    from vllm.v1.spec_decode.custom_class_proposer import create_custom_proposer

    config = SimpleNamespace(
        speculative_config=SimpleNamespace(
            num_speculative_tokens=4, model="slipstream.vllm_proposers.PromptLookup"
        ),
        model_config=SimpleNamespace(max_model_len=64),
        additional_config={},
    )
    assert ask(create_custom_proposer(config), [1, 2, 3, 9, 1, 2]) == [[3, 9, 1, 2]]
