"""Plain decoding: one forward, one token. The reference for exactness and the baseline for speed.

It uses the same target calls and the same cache as the engine, and nothing of trees or drafters.
"""

import time

import torch

from slipstream.core.clock import Clock
from slipstream.core.sampling import Sampling, SeededRandomness
from slipstream.decoding.answer import Answer, Generation, Limits, TokenCallback
from slipstream.decoding.statistics import Statistics
from slipstream.targets.target import Target


class PlainDecoder:
    """Greedy or sampled decoding of one prompt at a time."""

    def __init__(self, target: Target, sampling: Sampling, limits: Limits):
        self.target, self.sampling, self.limits = target, sampling, limits

    @torch.inference_mode()
    def generate(
        self, prompt_ids: list[int], seed: int = 0, callback: TokenCallback | None = None
    ) -> Generation:
        """Answer `prompt_ids`; raises `InputError` for a prompt beyond the target's context."""
        started, clock = time.perf_counter(), Clock()
        target, randomness = self.target, SeededRandomness(seed)
        room = self.limits.check_prompt(target, prompt_ids)
        answer = Answer(target, self.limits, room, callback)
        cache = target.new_cache(len(prompt_ids) + room)
        everything = range(target.num_layers)
        positions = torch.arange(cache.capacity, device=target.device)[None]
        rows, share = prompt_ids, "prefill"
        forwards = -1
        while answer.finished is None:
            ids = torch.tensor([rows], device=target.device)
            here = positions[:, cache.length : cache.length + len(rows)]
            with clock.share(share):
                states = target.forward(ids, here, None, cache)
                logits = target.logits(states.hidden[0, -1])
            cache.commit([(everything, list(range(len(rows))))])
            if self.sampling.greedy:
                token = int(logits.argmax())
            else:
                token = randomness.draw(self.sampling.probabilities(logits))
            answer.emit(token, drafted=False)
            rows, share = [token], "verify"
            forwards += 1
        statistics = Statistics(
            1, len(answer.ids), forwards, time.perf_counter() - started, dict(clock.seconds)
        )
        return Generation(answer.ids, answer.text(), answer.finished, statistics)
