"""Two thousand prompts through what keeps most: memory, descriptors and threads stay the same.

    python -m pytest -s tests/long_run.py

It is a part of `make torture`: what else a process holds would be measured as well.
"""

import gc
import random
from collections.abc import Callable

import psutil
import pytest
import torch
from tests.drafters import untrained
from tests.tiny import VOCABULARY, tiny_speculator, tiny_target, tiny_tokenizer

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.engine import Engine
from slipstream.drafters.draft_model import DraftModel
from slipstream.drafters.streaming import Streaming
from slipstream.serving.counts import Counts
from slipstream.serving.jobs import Asked, Job
from slipstream.serving.worker import Worker

PROMPTS, WARM, GROWTH = 2000, 200, 1.02
"""How many prompts, after how many the memory is first read, and by what it may have grown."""
LIMITS = Limits(8)


def prompts(count: int):
    """Random ones, of all lengths that are drawn often enough in the first two hundred."""
    chance = random.Random(0)
    for _ in range(count):
        yield [chance.randrange(VOCABULARY) for _ in range(chance.randint(1, 24))]


def answers_of(drafter) -> Callable[[list[int]], None]:
    engine = Engine(tiny_target(), drafter, Sampling(), LIMITS, budget=6)
    return engine.generate


def streaming() -> Callable[[list[int]], None]:
    target = tiny_target()
    engine = Engine(
        target, Streaming(tiny_speculator(target), "deferred", 2), Sampling(), LIMITS, 6
    )
    return engine.generate


def draft_model() -> Callable[[list[int]], None]:
    return answers_of(DraftModel(tiny_target(seed=1, num_hidden_layers=1), 4))


def kept_stores() -> Callable[[list[int]], None]:
    return answers_of(untrained.lookahead(keep=True))


def server() -> Callable[[list[int]], None]:
    """The engine behind the server, four requests at a time, some of which are given up."""
    target = tiny_target()
    target.tokenizer = tiny_tokenizer()
    drafter = Streaming(tiny_speculator(target), "fused", 2)
    decoder = Engine(target, drafter, Sampling(), LIMITS, budget=6)
    worker, count = Worker(decoder, 4, 16, Counts()), iter(range(10**9))

    def answer(prompt: list[int]) -> None:
        number = next(count)
        text = " ".join(f"w{token}" for token in prompt)
        told = []
        job = Job(text, Sampling(), LIMITS, number, streamed=True)
        asked = Asked(job, told.append, lambda: number % 10 == 9 and len(told) > 1)
        assert worker.prepare(asked)
        worker.waiting.append(asked)
        worker.turn()
        while len(worker.running) + len(worker.waiting) > 3:
            worker.turn()

    return answer


def used(process: psutil.Process) -> tuple[int, int, int]:
    """Bytes in memory, descriptors, threads."""
    gc.collect()
    memory = process.memory_full_info().uss
    return memory, process.num_fds(), process.num_threads()


@pytest.mark.parametrize("way", [streaming, draft_model, kept_stores, server])
def test_nothing_grows_over_two_thousand_prompts(way):
    process, answer, kept = psutil.Process(), way(), None
    for number, prompt in enumerate(prompts(PROMPTS), start=1):
        answer(prompt)
        if number == WARM:
            kept = used(process)
    memory, descriptors, threads = used(process)
    print(
        f"{way.__name__}: {kept[0] / 2**20:.1f} MiB after {WARM}, {memory / 2**20:.1f} at the end"
    )
    assert memory <= GROWTH * kept[0]
    assert (descriptors, threads) == kept[1:]


def test_a_leak_is_seen():
    """The control: caches that are kept grow beyond the bound."""
    process, leaked = psutil.Process(), []
    for number in range(PROMPTS):
        leaked.append(torch.ones(4, 8, 64, 24, dtype=torch.float64))
        if number + 1 == WARM:
            kept = used(process)
    assert used(process)[0] > GROWTH * kept[0]
