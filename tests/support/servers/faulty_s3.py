"""An S3 proxy that answers some requests as a store in trouble does, and forwards all others to a real S3."""

from __future__ import annotations

import asyncio
import io
import threading
from collections import deque
from collections.abc import Callable
from enum import Enum
from types import TracebackType
from typing import Self

import aiohttp
from aiohttp import web

_HOP = {"transfer-encoding", "connection", "content-encoding"}


class Answer(Enum):
    PASSED = "the store's own answer"
    INTERNAL_ERROR = "500, and nothing is stored"
    STORED_BUT_ERROR = "500, although the object is stored"
    SLOW_DOWN = "503"
    CONFLICT = "409: another request for the key is in progress"
    PRECONDITION = "412: the object exists; in truth it does not"
    SLOW = "no answer until after every client's deadline"


_CODES = {
    Answer.INTERNAL_ERROR: (500, "InternalError"),
    Answer.STORED_BUT_ERROR: (500, "InternalError"),
    Answer.SLOW_DOWN: (503, "SlowDown"),
    Answer.CONFLICT: (409, "ConditionalRequestConflict"),
    Answer.PRECONDITION: (412, "PreconditionFailed"),
    Answer.SLOW: (503, "SlowDown"),
}


def refuse_nothing(method: str, path: str) -> bool:
    return False


class FaultyS3:
    """A context manager.

    `answers` are the answers to the next requests that put an object of a segment. Later requests are forwarded.
    `refuses` decides by method and path which requests are answered 503, until it is set to another function."""

    def __init__(self, target_url: str) -> None:
        self._target_url = target_url
        self.answers: deque[Answer] = deque()
        self.refuses: Callable[[str, str], bool] = refuse_nothing
        self.refused: list[tuple[str, str]] = []
        """The methods and paths of the refused requests."""
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ended = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faulty-s3")

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            (self.url,) = (f"http://127.0.0.1:{address[1]}" for address in runner.addresses)
            self._ready.set()
            await self._ended.wait()
            await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get("Expect") and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await request.content.read()
        is_ours = request.method == "PUT" and request.path.endswith((".log", ".indexes"))
        if self.refuses(request.method, request.path):
            self.refused.append((request.method, request.path))
            answer = Answer.SLOW_DOWN
        else:
            answer = self.answers.popleft() if is_ours and self.answers else Answer.PASSED
        if answer is Answer.SLOW:
            await self._ended.wait()
        if answer in (Answer.PASSED, Answer.STORED_BUT_ERROR):
            passed = await self._pass(request, body)
            if answer is Answer.PASSED:
                return passed
        status, code = _CODES[answer]
        said = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{answer.value}</Message></Error>"
        return web.Response(status=status, text=said, content_type="application/xml")

    async def _pass(self, request: web.BaseRequest, body: bytes) -> web.Response:
        """Forwards the request with the client's own Host header, because the header is signed."""
        async with self._session.request(
            request.method,
            self._target_url + request.raw_path,
            headers=request.headers,
            data=io.BytesIO(body) if body else b"",
            allow_redirects=False,
        ) as answered:
            kept = {name: value for name, value in answered.headers.items() if name.lower() not in _HOP}
            return web.Response(status=answered.status, headers=kept, body=await answered.read())
