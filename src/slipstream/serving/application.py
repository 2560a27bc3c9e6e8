"""The HTTP side: the routes of the API, the same for processes and on Ray Serve.

A request is checked, becomes jobs for a backend, and its answer goes out at once or in pieces. A
client that goes cancels its jobs. The log says of each request what it cost, and nothing of what it
said.
"""

import asyncio
import hmac
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import ClientDisconnect

from slipstream.core.sampling import Sampling
from slipstream.decoding.answer import Limits
from slipstream.serving.counts import Board, Counts, Exposed
from slipstream.serving.jobs import Told
from slipstream.serving.protocol import (
    ApiError,
    Asking,
    ChatRequest,
    CompletionRequest,
    Shape,
    check_model,
    parsed,
    refusal,
)

log = logging.getLogger("slipstream.serving")
LARGEST_BODY, BODY_SECONDS = 4 << 20, 30
"""Bytes of a request, and how long a client may take to send them."""
WATCH_SECONDS = 1
"""Until a request looks whether the workers are still there."""


class Open:
    """Jobs of one request that are being answered, each of which has a place on the board. closed:
    called when nobody waits for them any more."""

    def __init__(
        self,
        board: Board,
        places: list[tuple[int, int]],
        closed: Callable[[], object] = lambda: None,
    ):
        self.board, self.places, self.closed = board, places, closed
        self.news: deque[tuple[int, Told]] = deque()
        self.event = asyncio.Event()

    def arrive(self, index: int, told: Told) -> None:
        """Something is told of a job."""
        self.news.append((index, told))
        self.event.set()

    async def told(self) -> AsyncIterator[tuple[int, Told]]:
        """Which of the jobs, and what is told of it; without an end."""
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.event.wait(), WATCH_SECONDS)
            self.event.clear()
            while self.news:
                index, told = self.news.popleft()
                if told.last:
                    self.board.free(*self.places[index])
                yield index, told
            if sentence := self.board.said:
                yield 0, Told(refused=sentence, failed=True)

    def close(self) -> None:
        """Nobody waits for the jobs any more; a second call changes nothing."""
        self.closed()
        for place in self.places:
            self.board.free(*place)


class Application:
    """The routes over a `backend`: its `open` takes jobs, and places for them on its `board`, and
    gives an `Open`; where it is `crowded`, no places are to be taken. model: the name it is served
    under; sampling, limits: of requests that ask for none; key: what clients must show, None for
    none."""

    def __init__(self, backend, model: str, sampling: Sampling, limits: Limits, key: str | None):
        self.backend, self.model, self.key = backend, model, key
        self.sampling, self.limits = sampling, limits
        self.started = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, ChatRequest)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, CompletionRequest)

    async def models(self, request: Request) -> Response:
        self._check_key(request)
        return JSONResponse({"object": "list", "data": [self._own_model()]})

    async def one_model(self, request: Request) -> Response:
        self._check_key(request)
        check_model(request.path_params["name"], self.model)
        return JSONResponse(self._own_model())

    def _own_model(self) -> dict:
        about = dict(id=self.model, object="model", created=self.started, owned_by="slipstream")
        cells = self.backend.board.cells
        return about | {"max_model_len": max(Counts(each)["positions"] for each in cells)}

    async def metrics(self, request: Request) -> Response:
        board = self.backend.board
        exposed = Exposed(self.model, list(map(Counts, board.cells)), board.open)
        return Response(generate_latest(exposed), media_type=CONTENT_TYPE_LATEST)

    def _check_key(self, request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        known = hmac.compare_digest(given.strip().encode(), (self.key or "").encode())
        if self.key and not (known and scheme.lower() == "bearer"):
            sentence = "the key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, sentence, code="invalid_api_key")

    async def _answer(self, request: Request, kind: type[Asking]) -> Response:
        started = time.perf_counter()
        self._check_key(request)
        asked = parsed(kind, await _body(request))
        jobs = asked.jobs(self.model, self.sampling, self.limits)
        if len(jobs) > (most := len(self.backend.board.owners)):
            sentence = (
                f"n: this server answers {most} choices of all prompts at most; ask for fewer"
            )
            raise ApiError(400, sentence, "n")
        if self.backend.crowded or (places := self.backend.board.take(len(jobs))) is None:
            raise ApiError(
                429, "too many requests are waiting; try again in a moment", code="queue_full"
            )
        opened = self.backend.open(jobs, places)
        shape = Shape(asked, self.model, len(jobs))
        answer = _Answering(opened, shape, started)
        try:
            work = answer.accepted() if asked.stream else answer.finished()
            there = await _unless_gone(request, work)
        except BaseException:
            answer.close()
            raise
        named = {"x-request-id": shape.id}  # under which the log has it
        if there and asked.stream:
            return _Stream(answer, named)
        answer.close()
        return JSONResponse(shape.whole(), headers=named) if there else Response(status_code=499)

    async def health(self, request: Request) -> Response:
        lost = self.backend.board.said
        return Response(lost or "ok", 503 if lost else 200)

    def app(self, lifespan: Callable | None = None) -> FastAPI:
        """The routes, and errors of any kind in the API's shape; lifespan: what surrounds all."""
        app = FastAPI(openapi_url=None, lifespan=lifespan)
        app.post("/v1/chat/completions")(self.chat)
        app.post("/v1/completions")(self.complete)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{name:path}")(self.one_model)
        app.get("/metrics")(self.metrics)
        app.get("/health")(self.health)

        async def refused(_: Request, error: ApiError) -> Response:
            log.info("a request was refused with status %d", error.status)
            headers = {"Retry-After": "1"} if error.status == 429 else None
            return JSONResponse(error.body(), error.status, headers)

        async def nowhere(request: Request, error: Exception) -> Response:
            status = getattr(error, "status_code", 404)
            sentence = "there is no such path" if status == 404 else "this path has other methods"
            return await refused(request, ApiError(status, f"{sentence}: {request.url.path}"))

        async def failed(request: Request, error: Exception) -> Response:
            return await refused(request, ApiError(500, "the server failed; try again"))

        app.add_exception_handler(ApiError, refused)
        app.add_exception_handler(404, nowhere)
        app.add_exception_handler(405, nowhere)
        app.add_exception_handler(Exception, failed)
        return app


class _Answering:
    """One request on its way: what was told of its jobs, and what is logged in the end."""

    def __init__(self, opened: Open, shape: Shape, started: float):
        self.opened, self.shape, self.started = opened, shape, started
        self.told, self.going = opened.told(), len(shape.ends)

    async def next(self) -> tuple[int, Told]:
        """Raises `ApiError` for a job that is refused."""
        index, told = await anext(self.told)
        if told.refused is not None:
            raise ApiError(500, told.refused) if told.failed else refusal(told.refused)
        self.shape.take(index, told)
        self.going -= told.last
        return index, told

    async def accepted(self) -> None:
        """Wait until a first job is accepted, before any text: errors until then have their status.
        Jobs of one prompt differ only in their seeds: the others will be accepted, too."""
        while not (await self.next())[1].accepted:
            pass

    async def finished(self) -> None:
        while self.going:
            await self.next()

    def close(self) -> None:
        self.opened.close()
        usage, seconds = self.shape.usage(), time.perf_counter() - self.started
        drafted = usage["completion_tokens_details"]["accepted_prediction_tokens"]
        ends = ",".join(end.finish_reason or "abort" for end in self.shape.ends)
        cost = usage["prompt_tokens"], usage["completion_tokens"], drafted, ends, seconds
        log.info("%s: %d + %d tokens, %d of them drafted, %s, %.3f s", self.shape.id, *cost)


class _Stream(StreamingResponse):
    """Server-sent events of an answer; however it ends, its jobs do."""

    def __init__(self, answer: _Answering, headers: dict[str, str]):
        super().__init__(self._events(answer), headers=headers, media_type="text/event-stream")
        self.answer = answer

    async def __call__(self, scope, receive, send) -> None:
        try:
            with suppress(ClientDisconnect):
                await super().__call__(scope, receive, send)
        finally:
            self.answer.close()

    async def _events(self, answer: _Answering) -> AsyncIterator[str]:
        shape = answer.shape
        try:
            for index in range(len(shape.ends)):
                if (opening := shape.opening(index)) is not None:
                    yield _event(opening)
            while answer.going:
                index, told = await answer.next()
                if not told.accepted:
                    yield _event(shape.chunk(index, told))
            if shape.tells_usage:
                yield _event(shape.last_chunk())
            yield "data: [DONE]\n\n"
        except ApiError as error:
            yield _event(error.body())


def _event(content: dict) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


async def _body(request: Request) -> bytes:
    """Of a request that says it is JSON, is not too long, and does not take too long."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "the content type must be application/json")
    found = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                found += part
                if len(found) > LARGEST_BODY:
                    raise ApiError(413, f"the body is larger than {LARGEST_BODY} bytes; shorten it")
    except TimeoutError as error:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS} s") from error
    except ClientDisconnect as error:
        raise ApiError(499, "the client has gone") from error
    return bytes(found)


async def _unless_gone(request: Request, work: Awaitable[None]) -> bool:
    """Do the work unless the client goes before its end; whether it was done."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, going = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({working, going}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        return working.done()
    finally:
        for each in (working, going):
            each.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await each
