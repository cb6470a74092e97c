"""`RangeConnection`: one HTTP/1.1 connection, which receives a body straight into its destination.

A connection sends one GET at a time. It is used again only after an answer that ended where its head said. In every
other case, also when its caller is cancelled, it closes. So no byte of one answer is ever taken for another one's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from tiers.storage.activity import PIECE_BYTES
from tiers.storage.remote_storage_manager import Allocate
from tiers.storage.s3.answer_head import HEAD_END, AnswerHead, MalformedAnswerError, dechunked, parse_head

MAX_HEAD_BYTES: Final = 16 << 10
"""Also the limit of all interim answers before an answer, together."""
ERROR_DOCUMENT_BYTES: Final = 16 << 10
"""The bytes of an error document that are read. A longer one ends the connection."""

_OK, _PARTIAL = 200, 206


class LostConnectionError(Exception):
    """The connection ended in the middle of an answer."""


class UnansweredError(LostConnectionError):
    """The connection ended before the first byte of an answer."""


class UnexpectedAnswerError(Exception):
    """The answer has another range than the one that was asked for."""


class ByteRange(NamedTuple):
    """The bytes `[start, end]`, both inclusive. An `end` of None: to the end of the object."""

    start: int
    end: int | None

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end is None

    def header(self) -> str:
        """Returns the Range field with its line end. Empty for a whole object."""
        return "" if self.is_whole else f"Range: bytes={self.start}-{'' if self.end is None else self.end}\r\n"


class RangeAnswer(NamedTuple):
    """`body` is the range if `has_range`. Otherwise it is the begin of an error document."""

    status: int
    has_range: bool
    body: memoryview


@dataclass(slots=True)
class _Body:
    """The body that is being received. `room` is where it goes; for an error document, it may be too small."""

    head: AnswerHead
    has_range: bool
    room: memoryview
    filled: int = 0
    noted: int = 0
    """The bytes that were noted as progress."""


@dataclass(slots=True)
class _Get:
    """The GET in progress. `body` is None until the head has arrived."""

    asked: ByteRange
    moved: Callable[[], None]
    allocate: Allocate
    answer: asyncio.Future[RangeAnswer]
    body: _Body | None = None
    interim_bytes: int = 0
    """The bytes of interim answers that have arrived before the answer itself."""


class RangeConnection(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self.idle_timer: asyncio.TimerHandle | None = None
        """The pool's own."""
        self._transport: asyncio.Transport | None = None
        self._get: _Get | None = None
        self._head = memoryview(bytearray(MAX_HEAD_BYTES))
        self._head_filled = 0

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open, and no GET is in progress."""
        return self._transport is not None and not self._transport.is_closing() and self._get is None

    async def get(self, request: bytes, asked: ByteRange, moved: Callable[[], None], allocate: Allocate) -> RangeAnswer:
        """Sends `request`, a whole GET with the field `asked.header()`, and returns the answer to it.

        `moved` is called for the head and for each piece of the body. `allocate` returns the destination of the body,
        for the number of bytes that the head announces.

        Raises `UnansweredError`, `LostConnectionError`, `UnexpectedAnswerError` and `MalformedAnswerError`."""
        transport = self._transport
        if transport is None or transport.is_closing():
            raise UnansweredError("the connection is closed")
        assert self._get is None, "a connection sends one GET at a time"
        get = self._get = _Get(asked, moved, allocate, asyncio.get_running_loop().create_future())
        transport.write(request)
        try:
            return await get.answer
        finally:
            if self._get is get:  # the caller was cancelled
                self.abort()

    def abort(self) -> None:
        """Closes at once. A GET in progress raises `LostConnectionError`."""
        self._fail(LostConnectionError("the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        said = "the store closed the connection" if exc is None else f"{type(exc).__name__}: {exc}"
        body = None if self._get is None else self._get.body
        if body is not None:
            self._fail(LostConnectionError(f"{said} after {body.filled} of {body.head.length} bytes"))
        elif self._head_filled or (self._get is not None and self._get.interim_bytes):
            self._fail(LostConnectionError(f"{said} in the head of its answer"))
        else:
            self._fail(UnansweredError(said))

    def eof_received(self) -> bool:
        get = self._get
        if get is not None and get.body is not None and get.body.head.ends_with_connection:
            body = get.body  # an error document: a range has a length
            self._end(get, body, body.room[: body.filled], is_clean=False)
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        get = self._get
        if get is None or get.body is None:
            return self._head[self._head_filled :]
        return get.body.room[get.body.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        get = self._get
        if get is None:
            self.abort()  # the store sends bytes that answer no request
            return
        try:
            if get.body is None:
                self._on_head(get, nbytes)
            else:
                self._on_body(get, get.body, nbytes)
        except Exception as error:
            self._fail(error)
            self.abort()

    def _on_head(self, get: _Get, nbytes: int) -> None:
        searched = max(0, self._head_filled - len(HEAD_END) + 1)
        self._head_filled += nbytes
        arrived = bytes(self._head[: self._head_filled])
        begin = 0
        while (end := arrived.find(HEAD_END, searched)) >= 0:
            head = parse_head(arrived[begin:end])
            begin = searched = end + len(HEAD_END)
            if not head.is_interim:
                get.moved()
                self._begin_body(get, head, arrived[begin:])
                return
        get.interim_bytes += begin
        self._head_filled -= begin
        self._head[: self._head_filled] = arrived[begin:]
        if get.interim_bytes + self._head_filled >= MAX_HEAD_BYTES:
            raise MalformedAnswerError(f"the head is longer than {MAX_HEAD_BYTES} bytes")

    def _begin_body(self, get: _Get, head: AnswerHead, early: bytes) -> None:
        """`early` are the bytes that arrived with the head."""
        has_range = _has_range(head, get.asked)
        length = 0 if head.has_no_body else head.length
        if not has_range:
            room = memoryview(bytearray(ERROR_DOCUMENT_BYTES if length is None else min(length, ERROR_DOCUMENT_BYTES)))
        else:
            assert length is not None
            try:
                room = get.allocate(length)
            except (MemoryError, OverflowError) as error:
                raise UnexpectedAnswerError(f"the answer announces {length} bytes") from error
        body = get.body = _Body(head, has_range, room)
        taken = min(len(early), len(room))
        room[:taken] = early[:taken]
        self._on_body(get, body, taken, has_more=len(early) > taken)

    def _on_body(self, get: _Get, body: _Body, nbytes: int, *, has_more: bool = False) -> None:
        """Takes the next bytes of the body. `has_more`: other bytes arrived behind those for which there was room."""
        head = body.head
        body.filled += nbytes
        if body.filled - body.noted >= PIECE_BYTES:
            body.noted = body.filled
            get.moved()
        is_full = body.filled == len(body.room)
        if head.is_chunked:
            document, is_complete = dechunked(bytes(body.room[: body.filled]))
            if is_complete or is_full:
                self._end(get, body, memoryview(document), is_clean=is_complete and not has_more)
        elif is_full:
            is_complete = head.has_no_body or body.filled == head.length
            self._end(get, body, body.room, is_clean=is_complete and not has_more)

    def _end(self, get: _Get, body: _Body, received: memoryview, *, is_clean: bool) -> None:
        """Ends the GET. `is_clean`: only an answer to another GET can follow on this connection."""
        self._get = None
        self._head_filled = 0
        if not (is_clean and body.head.stays_open):
            self.abort()
        if not get.answer.done():
            get.answer.set_result(RangeAnswer(body.head.status, body.has_range, received))

    def _fail(self, error: Exception) -> None:
        """Ends the GET in progress, if there is one. The caller closes the connection."""
        get, self._get = self._get, None
        self._head_filled = 0
        if get is not None and not get.answer.done():
            get.answer.set_exception(error)


def _has_range(head: AnswerHead, asked: ByteRange) -> bool:
    """Returns whether the body is the range that was asked for. False for the status of an error.

    The range may end before the one that was asked for, if the answer says that the object does. A caller may take the
    end of a range for the end of the object, and an object that is too short for damaged.

    Raises `UnexpectedAnswerError` for another range."""
    if head.status != (_OK if asked.is_whole else _PARTIAL):
        return False
    if head.length is None or (asked.end is not None and head.length > asked.end + 1 - asked.start):
        raise UnexpectedAnswerError(f"the answer announces {head.length} bytes for {asked}")
    found = head.content_range
    is_complete = asked.is_whole or (asked.end is not None and head.length == asked.end + 1 - asked.start)
    if not is_complete and (found is None or found.last + 1 != found.size):
        raise UnexpectedAnswerError(f"the answer has {head.length} bytes for {asked}, before the end of the object")
    if found is not None:
        first, last, _ = found
        if first != asked.start or last + 1 - first != head.length:
            raise UnexpectedAnswerError(f"the answer has {head.length} bytes, as the range {first}-{last}, for {asked}")
    return True
