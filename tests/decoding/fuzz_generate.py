"""Random cases of greedy decoding against transformers' own `generate`, in float64.

`make fuzz COUNT=10000` runs as many and prints what they were; `test_fuzz_generate.py` runs some.
A case is a batch: prompts, end tokens, stop strings and a limit, a drafter, a budget, and how many
rows of a prompt run at once. Every answer of it must be that of `generate`, token for token, cut
where its text first holds a stop string.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from functools import cache

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.decoding.test_greedy_identity import RandomTrees
from tests.drafters import untrained
from tests.tiny import ARCHITECTURES, VOCABULARY, tiny_speculator, tiny_target, tiny_tokenizer

from slipstream.core.sampling import Sampling
from slipstream.decoding import decoder
from slipstream.decoding.answer import Generation, Limits
from slipstream.decoding.engine import Engine
from slipstream.decoding.plain import PlainDecoder
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.targets.target import Target

SEEDS = 3
"""Models of each family."""
STREAMS = {
    "fused": ("fused", {}, {}),
    "deferred": ("deferred", dict(root_rank=2), {}),
    "pruned": ("fused", dict(pruning_layer=3), dict(prune_threshold=0.05, prune_cap=4)),
    "pairs": ("deferred", dict(transition_rank=2, copy_scores=True), {}),
}
DRAFTERS = (
    *("plain", "random trees", "draft_model", "draft_model_itself", *STREAMS),
    *sorted(untrained.untrained([[1, 2, 3]])),
)
TOKENS = st.integers(0, VOCABULARY - 1)
PROMPTS = st.lists(TOKENS, min_size=1, max_size=12) | st.builds(  # and some that repeat themselves
    lambda part, times: part * times, st.lists(TOKENS, min_size=1, max_size=3), st.integers(2, 5)
)


@dataclass(frozen=True)
class Case:
    """One batch; end_ids and stop count from the answers' own tokens, so that they occur: (prompt,
    place) pairs; width: of a stop string, in tokens."""

    architecture: str
    seed: int
    drafter: str
    prompts: tuple[tuple[int, ...], ...]
    budget: int
    max_new_tokens: int
    ends: tuple[tuple[int, int], ...]
    stops: tuple[tuple[int, int], ...]
    width: int
    rows: int


CASES = st.builds(
    Case,
    architecture=st.sampled_from(sorted(ARCHITECTURES)),
    seed=st.integers(0, SEEDS - 1),
    drafter=st.sampled_from(DRAFTERS),
    prompts=st.lists(PROMPTS.map(tuple), min_size=1, max_size=4).map(tuple),
    budget=st.integers(1, 16),
    max_new_tokens=st.integers(1, 12),
    ends=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=2).map(tuple),
    stops=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 11)), max_size=2).map(tuple),
    width=st.integers(1, 2),
    rows=st.sampled_from((1, 3, 1024)),
)


@cache
def target_of(architecture: str, seed: int) -> Target:
    target = tiny_target(architecture, seed)
    target.tokenizer = tiny_tokenizer()
    return target


@cache
def streaming_of(architecture: str, seed: int, name: str) -> Streaming:
    schedule, config, options = STREAMS[name]
    speculator = tiny_speculator(target_of(architecture, seed), seed, **config)
    return Streaming(speculator, schedule, 3, **options)


@cache
def draft_of(seed: int) -> Target:
    return tiny_target("llama", seed=5 + seed, num_hidden_layers=1)


def generated(target: Target, prompt: tuple[int, ...], count: int, ends: list[int]) -> list[int]:
    """The tokens of transformers' own `generate`."""
    ids = torch.tensor([prompt], device=target.device)
    output = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=ends or None,
    )
    return output[0, len(prompt) :].tolist()


def drafter_of(case: Case, target: Target, truth: list[int]):
    if case.drafter == "random trees":
        return RandomTrees(truth, case.budget)
    if case.drafter == "draft_model":
        return DraftModel(draft_of(case.seed), 4)
    if case.drafter == "draft_model_itself":
        return DraftModel(target, 4)
    if case.drafter in STREAMS:
        return streaming_of(case.architecture, case.seed, case.drafter)
    return untrained.untrained([truth, truth[::-1]])[case.drafter]


def texts_of(target: Target, ids: list[int]) -> list[str]:
    """The text after each token."""
    decode = target.tokenizer.decode
    return [decode(ids[: end + 1], skip_special_tokens=True) for end in range(len(ids))]


def expected_of(target: Target, ids: list[int], ends: list[int], stops: list[str]) -> tuple:
    """Tokens, text and end of an answer, from what `generate` wrote."""
    for place, text in enumerate(texts_of(target, ids)):
        if ids[place] in ends:
            break  # an end token counts before a stop string
        if any(stop in text for stop in stops):
            first = min(text.find(stop) for stop in stops if stop in text)
            return ids[: place + 1], text[:first], "stop"
    text = texts_of(target, ids)[-1]
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    return ids, text[:first], "end" if ids[-1] in ends else "length"


def check(case: Case) -> list[Generation]:
    """Decode the case and compare every answer; AssertionError where one differs."""
    target = target_of(case.architecture, case.seed)
    count, prompts = case.max_new_tokens, case.prompts
    endless = [generated(target, prompt, count, []) for prompt in prompts]
    ends = [endless[one % len(prompts)][place % count] for one, place in case.ends]
    stops = []
    for one, place in case.stops:
        start = place % count
        part = endless[one % len(prompts)][start : start + case.width]
        text = target.tokenizer.decode(part, skip_special_tokens=True)
        stops += [text] if text else []
    sampling = Sampling()
    limits = Limits(count, stops, frozenset(ends))
    if case.drafter == "plain":
        found = PlainDecoder(target, sampling, limits)
    else:
        drafter = drafter_of(case, target, list(prompts[0]) + endless[0])
        found = Engine(target, drafter, sampling, limits, case.budget)
    before, decoder.PREFILL_ROWS = decoder.PREFILL_ROWS, case.rows
    try:
        answers = found.generate_batch([list(prompt) for prompt in prompts])
    finally:
        decoder.PREFILL_ROWS = before
    for prompt, answer, ids in zip(prompts, answers, endless, strict=True):
        ids = generated(target, prompt, count, ends) if ends else ids
        expected = expected_of(target, ids, ends, stops)
        assert (answer.ids, answer.text, answer.finished) == expected
    return answers


def main(count: int) -> None:
    """Check so many cases and print what they were."""
    torch.set_num_threads(1)
    seen: dict[str, Counter] = {name: Counter() for name in ("architecture", "drafter", "end")}
    numbers = Counter()

    @settings(max_examples=count, database=None, deadline=None, derandomize=True)
    @given(CASES)
    def run(case: Case) -> None:
        answers = check(case)
        seen["architecture"][case.architecture] += 1
        seen["drafter"][case.drafter] += 1
        seen["end"].update(answer.finished for answer in answers)
        numbers["cases"] += 1
        numbers["answers"] += len(answers)
        numbers["tokens"] += sum(len(answer.ids) for answer in answers)
        numbers["drafted tokens"] += sum(answer.statistics.drafted for answer in answers)
        if numbers["cases"] % 500 == 0:
            print(dict(numbers), flush=True)

    run()
    for name, counts in seen.items():
        print(f"{name}: {dict(sorted(counts.items()))}")
    print(f"identical to generate: {dict(numbers)}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
