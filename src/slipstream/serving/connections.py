"""Connections of clients that are slow: one that does not send, or does not read, is not kept."""

import asyncio
import json
import logging

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from slipstream.serving.protocol import ApiError

log = logging.getLogger("slipstream.serving")
HEAD_SECONDS, READ_SECONDS = 30, 60
"""How long the head of a request may take to come, and an answer not to be read."""


class Connection(AutoHTTPProtocol):
    """uvicorn's, which would wait for the head of a request for ever. (Of bodies that are late the
    application says so.)"""

    awaited: asyncio.TimerHandle | None = None
    unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._expect()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.awaited, self.unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """More is to be written than the client reads. (To close the connection would wait until
        all has been read.)"""
        super().pause_writing()
        self.unread = self.loop.call_later(READ_SECONDS, self._give_up)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.unread is not None:
            self.unread.cancel()

    def _give_up(self) -> None:
        log.warning("a client that does not read its answer gets no more of it")
        self.transport.abort()

    def _expect(self) -> None:
        """Unless a request is being answered, look again when its head should have come."""
        if self.awaited is None and (self.cycle is None or self.cycle.response_complete):
            self.awaited = self.loop.call_later(HEAD_SECONDS, self._look, self.cycle)

    def _look(self, before: object) -> None:
        self.awaited = None
        if self.transport.is_closing():
            return
        if self.cycle is not before:  # another request has come
            return self._expect()
        late = ApiError(408, f"the head of a request did not arrive within {HEAD_SECONDS} s")
        body = json.dumps(late.body()).encode()
        head = b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\n"
        self.transport.write(head + b"Content-Length: %d\r\n" % len(body))
        self.transport.write(b"Connection: close\r\n\r\n" + body)
        self.transport.close()
