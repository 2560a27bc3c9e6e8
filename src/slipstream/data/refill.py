"""The target's own answers: requests join as others finish, so that a batch stays full.

Prompts come in portions of similar length, the longest first. A portion is answered from an empty
batch on, whatever was answered before it and whichever process does: rounding depends on what is
computed together, so a run that is continued, or shared, finds the same answers.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from slipstream.core.sampling import Sampling
from slipstream.data.answers import Answered, Answerer, Question
from slipstream.decoding.answer import Limits
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.plain import PlainDecoder
from slipstream.decoding.request import Answering
from slipstream.targets.compiled import batch_within, compile_target
from slipstream.targets.packed import is_packed, pack_linears, packing_available
from slipstream.targets.quantized import is_quantized
from slipstream.targets.target import Target

log = logging.getLogger(__name__)

# More requests together gain little on a GPU and nothing on a CPU.
MOST_REQUESTS = 64
# So many requests' worth of a full batch make a portion: at its end the batch empties.
FULL_BATCHES = 8
# Requests join once this share of the batch is free: whenever some do, the cache is copied, and
# prompts that are read together are padded to the longest of them.
JOINING = 1 / 4
# Caches there are at that moment, in full ones: the old one, that of the new requests, the new one.
CACHES = 2.5


class OwnAnswers(Answerer):
    """Plain decoding of `target`, of up to `max_new_tokens` tokens; memory: bytes that its caches
    may take."""

    def __init__(self, target: Target, max_new_tokens: int, memory: int):
        self.target, self.limits, self.memory = target, Limits(max_new_tokens), memory
        self.vocab_size = target.vocab_size
        # The layers of a target that is spread over processes run in all of them at once.
        self.shared = target.num_parallel == 1

    def portions(self, questions: Sequence[Question]) -> list[list[int]]:
        sizes = [len(question.ids) for question in questions]
        order = sorted(range(len(sizes)), key=lambda number: -sizes[number])
        found = []
        while order:
            count = FULL_BATCHES * self.most(sizes[order[0]])
            found.append(order[:count])
            order = order[count:]
        return found

    def most(self, longest: int) -> int:
        """How many requests of prompts of up to `longest` tokens fit the memory, at least one."""
        length = min(longest + self.limits.max_new_tokens, self.target.max_positions)
        slots = self.memory / CACHES / cache_bytes(self.target)
        return min(MOST_REQUESTS, batch_within(slots, length, self.target))

    def answer(
        self, questions: Sequence[Question], portions: list[list[int]], done: Callable[[int], None]
    ) -> Iterator[dict[int, Answered]]:
        longest = len(questions[portions[0][0]].ids)
        log.info(
            "answering %d at a time: %d bytes of cache a token, prompts of up to %d tokens, "
            "answers of up to %d",
            self.most(longest), cache_bytes(self.target), longest, self.limits.max_new_tokens,
        )  # fmt: skip
        with working_copy(self.target) as target:
            decoder, before = PlainDecoder(target, Sampling(), self.limits), None
            for portion in portions:
                asked = [questions[number] for number in portion]
                most = self.most(len(asked[0].ids))
                if before not in (None, most):  # more and shorter texts: buffers of other sizes
                    compile_target(target, "auto")
                before = most
                requests = [
                    decoder.request(each.ids, each.seed, sampling=Sampling(each.temperature))
                    for each in asked
                ]
                refilled(decoder, requests, most, done)
                yield {
                    number: Answered(request.answer.ids, request.answer.finished == "end")
                    for number, request in zip(portion, requests, strict=True)
                }


def refilled(
    decoder: Decoder, requests: list[Answering], most: int, done: Callable[[int], None]
) -> None:
    """Answer all requests, at most `most` at a time: in the order given they join as others
    finish; `done` is called as so many more are."""
    waiting, joining = deque(requests), max(1, int(most * JOINING))
    while waiting or decoder.running is not None:
        running = 0 if decoder.running is None else len(decoder.running.requests)
        if waiting and most - running >= joining:
            fresh = [waiting.popleft() for _ in range(min(joining, len(waiting)))]
            decoder.start(fresh)
            done(sum(request.finished for request in fresh))
        else:
            done(len(decoder.step()))


def cache_bytes(target: Target) -> int:
    """Bytes of one token's keys and values in all layers."""
    return target.allocate(1, 1).nbytes


@contextmanager
def working_copy(target: Target) -> Iterator[Target]:
    """Within, the target as this device runs it fastest; at the end it is as it was.

    A float32 target computes in bfloat16, where the device can: good enough for texts to learn
    from. On a CPU the weights are a reordered copy; on a CUDA device steps run compiled.
    """
    model, on_cpu = target.model, target.device.type == "cpu"
    whole = target.num_parallel == 1 and not hasattr(model, "hf_device_map")
    ordinary = whole and not is_packed(model) and not is_quantized(model)
    lower = target.dtype == torch.float32 and (not on_cpu or packing_available(torch.bfloat16))
    worker, compiled, mode = target, target.compiled, target.compile_mode
    if ordinary and (lower or (on_cpu and packing_available(target.dtype))):
        worker = Target(copy.deepcopy(model), target.tokenizer, target.name)
        for parameter in worker.model.parameters() if lower else ():  # buffers stay as they are
            parameter.data = parameter.data.bfloat16()
        if on_cpu:
            pack_linears(worker.model)
    compile_target(worker, "auto")
    try:
        yield worker
    finally:
        target.compiled, target.compile_mode = compiled, mode
