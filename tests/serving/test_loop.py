"""The loops of worker processes, as threads here: they share a queue, the board and its places."""

import asyncio
import queue
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace

import httpx
import pytest
import uvicorn
from tests.serving.conftest import free_port
from tests.serving.test_worker import LIMITS, engine, worker

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.decoding.plain import PlainDecoder
from slipstream.serving import processes, server
from slipstream.serving.application import Application, Open
from slipstream.serving.counts import Counts
from slipstream.serving.jobs import Job, Told
from slipstream.serving.processes import Workers


class Pool:
    """Workers on one queue, in threads. opens jobs as `Workers` does, within a loop."""

    def __init__(self, places: int, loops: int, most: int):
        server = SimpleNamespace(max_running=0, max_waiting=places)
        self.backend = Workers(server, None, ["cpu"] * loops)
        self.board, self.backend.jobs = self.backend.board, queue.Queue()
        self.loop = asyncio.get_running_loop()
        self.workers = [worker(engine(), most, 64) for _ in range(loops)]
        for own, cells in zip(self.workers, self.board.cells, strict=True):
            own.counts = Counts(cells)

    def start(self) -> None:
        for own in self.workers:
            told = own, self.board, self.backend.jobs, self.tell
            threading.Thread(target=processes.answer, args=told, daemon=True).start()

    def tell(self, news: processes.News) -> None:
        self.loop.call_soon_threadsafe(self._arrived, *news)

    def _arrived(self, number: int, index: int, told: Told) -> None:
        if number in self.backend.opened:
            self.backend.opened[number].arrive(index, told)

    def ask(self, words: str) -> Open | None:
        places = self.board.take(1)
        return places and self.backend.open([Job(words, Sampling(), LIMITS, 0, False)], places)


async def answer(opened: Open) -> tuple[str, Told]:
    """The text and the last word of a single job."""
    text = ""
    async for _, told in opened.told():
        text += told.text
        if told.last:
            opened.close()
            return text, told


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0.01)


def test_waiting_requests_whose_clients_have_gone_give_up_their_places():
    async def scene() -> None:
        pool = Pool(places=4, loops=1, most=1)
        going = [pool.ask("w9 w10") for _ in range(4)]
        assert pool.ask("w9") is None
        for each in going:  # nobody has received them yet
            each.close()
        assert pool.board.open == 0
        kept = pool.ask("w9 w10")
        pool.start()
        _, end = await asyncio.wait_for(answer(kept), 30)
        own = pool.workers[0]
        assert end.finish_reason in ("stop", "length") and own.counts["abort"] == 4
        await until(lambda: own.idle)
        assert own.counts["prompt_tokens"] == 2 and pool.board.open == 0

    asyncio.run(scene())


def test_two_loops_share_the_requests_and_count_each_once():
    prompts = [f"w{8 + number} w9 w{10 + number % 3}" for number in range(12)]

    async def scene() -> None:
        pool = Pool(places=12, loops=2, most=2)
        opened = [pool.ask(prompt) for prompt in prompts]
        pool.start()
        found = await asyncio.wait_for(asyncio.gather(*map(answer, opened)), 60)
        plain = PlainDecoder(engine().target, Sampling(), LIMITS)
        for prompt, (text, end) in zip(prompts, found, strict=True):
            ids = [int(word[1:]) for word in prompt.split()]
            expected = plain.generate(ids)
            assert text == expected.text and end.completion_tokens == len(expected.ids)
        await until(lambda: all(own.idle for own in pool.workers))
        ends = [own.counts["stop"] + own.counts["length"] for own in pool.workers]
        assert sum(ends) == 12 and min(ends) > 0
        tokens = sum(own.counts["generation_tokens"] for own in pool.workers)
        assert tokens == sum(end.completion_tokens for _, end in found)
        application = Application(pool.backend, "mine", Sampling(), Limits(), None)
        text = (await application.metrics(None)).body.decode()
        assert f'generation_tokens_total{{model_name="mine"}} {tokens}.0' in text
        assert 'num_requests_waiting{model_name="mine"} 0.0' in text

    asyncio.run(scene())


@pytest.mark.parametrize("seconds", [0.2, 60])
def test_a_server_that_is_told_to_end_tells_those_whose_answers_are_open(
    monkeypatch, caplog, seconds
):
    """When their time is up, or at a second Ctrl-C."""
    monkeypatch.setattr(server, "END_SECONDS", seconds)

    async def scene() -> list[httpx.Response]:
        pool = Pool(places=4, loops=1, most=1)  # never started: nothing is answered
        port, own = free_port(), Application(pool.backend, "mine", Sampling(), Limits(), None)
        config = uvicorn.Config(own.app(), port=port, log_config=None, timeout_graceful_shutdown=9)
        listening = server.Listening(config, pool.backend)
        serving = asyncio.ensure_future(listening.serve())
        await until(lambda: listening.started)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            asked = [
                client.post("/v1/completions", json=dict(prompt="w9", stream=streamed))
                for streamed in (False, True)
            ]
            answers = asyncio.gather(*asked)
            await until(lambda: len(pool.backend.opened) == 2)
            listening.handle_exit(signal.SIGTERM, None)
            if seconds > 9:
                listening.handle_exit(signal.SIGINT, None)
            found = await answers
        listening._captured_signals.clear()  # which it would send to this process
        await serving
        return found

    for found in asyncio.run(scene()):
        assert found.status_code == 500
        assert found.json()["error"]["message"] == processes.ENDING
    assert "Traceback" not in caplog.text
