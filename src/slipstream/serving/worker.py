"""Continuous batching: requests join and leave between the steps of one decoder.

One thread owns the decoder. `turn` drops the requests whose clients have gone, lets waiting ones
join, reads on in a long prompt, makes a step, and tells what was decided. Short prompts are read at
once; a long one in parts, a part between two steps, so that the others go on. It knows no HTTP.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator

from slipstream.core.errors import InputError, device_lost, out_of_memory
from slipstream.decoding.decoder import Decoder
from slipstream.decoding.request import Answering
from slipstream.serving.counts import Counts
from slipstream.serving.jobs import Asked, Told
from slipstream.targets.reading import PREFILL_ROWS

log = logging.getLogger(__name__)
NOT_STARTED = "requests could not start; they are answered with an error, the others go on"
FAILED = "the server failed to answer; try again"


class Worker:
    """Answers jobs with `decoder`, up to `most_running` at a time; prompts of more than
    `prefill_rows` tokens are read in parts of so many."""

    def __init__(self, decoder: Decoder, most_running: int, prefill_rows: int, counts: Counts):
        self.decoder, self.most_running, self.rows = decoder, most_running, prefill_rows
        self.counts = counts
        counts["positions"] = decoder.target.max_positions
        self.waiting: deque[Asked] = deque()
        self.running: dict[Answering, Asked] = {}
        self.reading: tuple[Asked, Iterator[None]] | None = None
        self.full = False  # there was no memory for more requests beside those that are running
        # of a token, the space before it, which some tokenizers drop, included
        longest = 1 + max(len(token.encode()) for token in decoder.target.tokenizer.get_vocab())
        self.most_bytes = decoder.target.max_positions * longest

    def prepare(self, asked: Asked) -> bool:
        """Make its request, or refuse it; may run in another thread than the decoder's. One whose
        client has gone ends at once, and is to be counted."""
        if asked.gone():
            asked.tell(Told(finish_reason="abort"))
            return True
        job, target = asked.job, self.decoder.target
        try:
            most, usual = job.limits.max_new_tokens, self.decoder.limits.max_new_tokens
            if most > target.max_positions and most != usual:  # the server's own limit is cut
                raise InputError(
                    f"max_tokens: the model's context has {target.max_positions} tokens; ask for "
                    "fewer"
                )
            ids = job.ids(target, self.most_bytes)
            told = job.seed, lambda _, __, text: asked.pieces.append(text)
            asked.request = self.decoder.request(ids, *told, job.sampling, job.limits)
            asked.prompt_tokens = len(ids)
        except InputError as error:
            asked.tell(Told(refused=str(error)))
            return False
        except Exception:
            log.exception("a request could not be prepared")
            asked.tell(Told(refused=FAILED, failed=True))
            return False
        asked.tell(Told(accepted=True))
        return True

    def take(self, asked: Asked) -> None:
        """A prepared request waits until it is started; one whose client had gone is counted."""
        if asked.request is None:
            self.counts["abort"] += 1
        else:
            self.waiting.append(asked)

    @property
    def idle(self) -> bool:
        return not (self.waiting or self.running or self.reading)

    def work(self, receive: Callable[[], Asked | None]) -> None:
        """Answer what `receive` gives, until that is None; another thread waits for it, and
        prepares it."""
        arrived: queue.SimpleQueue[Asked | None] = queue.SimpleQueue()

        def prepare_all() -> None:
            while (asked := receive()) is not None:
                if self.prepare(asked):
                    arrived.put(asked)
            arrived.put(None)

        threading.Thread(target=prepare_all, daemon=True).start()
        while True:
            while self.idle or not arrived.empty():
                if (asked := arrived.get()) is None:
                    return
                self.take(asked)
            self.turn()

    def turn(self) -> None:
        """Go on with everything by one step; an error in it is told to those it concerns."""
        try:
            self._drop_gone()
            self._let_join()
            if self.reading is not None:  # one part of a long prompt
                (asked, parts), self.reading = self.reading, None
                self.reading = (asked, parts) if self._read([asked], parts) else None
            self.decoder.step()
            self._tell()
        except Exception as error:
            log.exception("a step failed; its requests are answered with an error")
            self.decoder.running = None
            self._give_back(error)
            if any(request.failed for request in self.running):  # the others begin anew from there
                self._tell()
                self.waiting.extendleft(reversed(self.running.values()))
                concerned = []
            else:
                concerned = [*self.running.values(), *([self.reading[0]] if self.reading else [])]
                self.reading = None
            self.running.clear()
            self._fail(concerned)
            if device_lost(error):  # whatever started this process is to start another
                raise
        self.counts["running"] = len(self.running) + (self.reading is not None)

    def _fail(self, concerned: list[Asked]) -> None:
        self.counts["error"] += len(concerned)
        for asked in concerned:
            asked.tell(Told(refused=FAILED, failed=True))

    def _give_back(self, error: Exception) -> None:
        """Where memory has run out, what CUDA graphs hold is free again."""
        compiled = self.decoder.target.compiled
        if compiled is not None and out_of_memory(error):
            compiled.graphs.clear()

    def _drop_gone(self) -> None:
        for asked in [each for each in self.waiting if each.gone()]:
            self.waiting.remove(asked)
            self._end(asked, "abort")
        if self.reading and self.reading[0].gone():
            asked, parts = self.reading
            parts.close()
            self.reading = None
            self._end(asked, "abort")
        for request, asked in list(self.running.items()):
            if asked.gone():
                self.decoder.finish(request)
                del self.running[request]
                self._end(asked, "abort")

    @property
    def _others(self) -> bool:
        """Whether requests are being answered, or a long prompt is being read."""
        return bool(self.running or self.reading)

    def _let_join(self) -> None:
        """Those that fit, in their order: short prompts together, and one long one to be read."""
        self.full = self.full and self._others
        room = self.most_running - len(self.running) - (self.reading is not None)
        room = 0 if self.full else room
        fresh: list[Asked] = []
        for asked in list(self.waiting):
            if room <= 0:
                break
            lengths = [len(each.request.tokens) for each in (*fresh, asked)]
            if lengths[-1] > self.rows and self.reading is None:
                self.reading = asked, self.decoder.starting([asked.request], self.rows)
            elif max(lengths) * len(lengths) <= self.rows:
                fresh.append(asked)
            else:
                continue
            self.waiting.remove(asked)
            room -= 1
        if fresh:
            self._start(fresh)

    def _start(self, fresh: list[Asked]) -> None:
        """Short prompts, together and at once."""
        requests, rows = [asked.request for asked in fresh], min(self.rows, PREFILL_ROWS)
        parts = self.decoder.starting(requests, rows)
        while self._read(fresh, parts):
            pass

    def _read(self, fresh: list[Asked], parts: Iterator[None]) -> bool:
        """Read the next part of these prompts; with the last one their requests join. Returns
        whether there are more parts."""
        before = self.decoder.running
        try:
            next(parts)
            return True
        except StopIteration:
            self.running |= {asked.request: asked for asked in fresh}
            read = [asked.prompt_tokens for asked in fresh if not asked.tokens]
            self.counts["prompt_tokens"] += sum(read)
        except InputError as error:  # of a drafter that does not take the sampling of one
            if fresh[0].request.failed and len(fresh) == 1:
                log.error("a prompt failed: %s", error)
                self._fail(fresh)
            elif len(fresh) == 1:
                fresh[0].tell(Told(refused=str(error)))
            else:
                self._start_each(fresh)
        except Exception as error:
            self._give_back(error)
            joining = self.decoder.running is not before
            if out_of_memory(error) and not joining and len(fresh) > 1:
                self._start_each(fresh)
                return False
            if out_of_memory(error) and not joining and self._others:
                self.full = True  # until one of the others ends
                self.waiting.extendleft(fresh)
                log.warning("no memory for more requests: they wait until others end")
                return False
            self._fail(fresh)
            if joining or device_lost(error):
                raise
            log.exception(NOT_STARTED)
        return False

    def _start_each(self, fresh: list[Asked]) -> None:
        """Start them one by one, as long as there is room; until then they are at the head of those
        that wait, should one of them fail in its turn."""
        self.waiting.extendleft(reversed(fresh))
        for asked in fresh:
            if not self.full:
                self.waiting.remove(asked)
                self._start([asked])

    def _tell(self) -> None:
        for request, asked in list(self.running.items()):
            self._count(asked)
            if request.failed:
                del self.running[request]
                self._fail([asked])
            elif request.finished:
                del self.running[request]
                self._end(asked, "length" if request.answer.finished == "length" else "stop")
            elif asked.job.streamed:
                text = "".join(asked.pieces)
                asked.pieces.clear()
                if text:
                    asked.tell(Told(text=text))

    def _count(self, asked: Asked) -> None:
        """What was decided of a request since it was last counted: at most one forward."""
        request, tokens = asked.request, len(asked.request.answer.ids)
        self.counts["generation_tokens"] += tokens - asked.tokens
        nodes = request.rows - asked.rows - 1
        if len(request.accepted) > asked.forwards and nodes > 0:
            self.counts.verified(nodes, request.accepted[-1])
        asked.tokens, asked.rows, asked.forwards = tokens, request.rows, len(request.accepted)

    def _end(self, asked: Asked, reason: str) -> None:
        self.counts[reason] += 1
        self.full = False
        request = asked.request
        drafted = request.answer.drafted
        proposed = request.rows - len(request.accepted)
        asked.tell(
            Told(
                text="".join(asked.pieces),
                finish_reason=reason,
                prompt_tokens=asked.prompt_tokens,
                completion_tokens=len(request.answer.ids),
                drafted=drafted,
                rejected=max(0, proposed - drafted),
                ids=tuple(request.answer.ids),
            )
        )
