"""`RangeConnection`: one HTTP/1.1 connection, which receives the bytes of a range straight into their destination.

It takes one kind of answer: the range, with its length. The client library knows all others, so the caller asks it.

A connection sends one GET at a time. It is used again only after an answer that ended where its head said. In every
other case, also when its caller is cancelled, it closes. So no byte of one answer is ever taken for another one's.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

from tiers.storage.activity import PIECE_BYTES
from tiers.storage.remote_storage_manager import Allocate

MAX_HEAD_BYTES: Final = 16 << 10

_HEAD_END: Final = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\0]*)")
_NUMBER = re.compile(rb"[0-9]{1,18}")
_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_OK, _PARTIAL = 200, 206


class LostConnectionError(ConnectionError):
    """The connection ended in the middle of an answer."""


class UnansweredError(LostConnectionError):
    """The connection ended before the first byte of an answer."""


class UnexpectedAnswerError(Exception):
    """The answer has another range than the one that was asked for."""


class OtherAnswerError(Exception):
    """The answer is none of a range with its length. `status` is 0 if it is none of HTTP/1.1."""

    def __init__(self, status: int) -> None:
        super().__init__(f"an answer of status {status} that is no range")
        self.status = status


class ByteRange(NamedTuple):
    """The bytes `[start, end]`, both inclusive. An `end` of None: to the end of the object."""

    start: int
    end: int | None

    @property
    def is_whole(self) -> bool:
        return self.start == 0 and self.end is None

    @property
    def value(self) -> str:
        """The value of the field Range. A whole object is asked for without it."""
        return f"bytes={self.start}-{'' if self.end is None else self.end}"

    def destination(self, length: int | None, content_range: str, allocate: Allocate) -> memoryview:
        """Returns memory for the body of an answer with these fields.

        The range may end before the one that was asked for, if the answer says that the object does. A caller may take
        the end of a range for the end of the object, and an object that is too short for damaged.

        Raises `UnexpectedAnswerError` for another range, and for more bytes than memory has."""
        if length is None or not self._is_answered(length, content_range):
            raise UnexpectedAnswerError(f"the answer has {length} bytes, as the range {content_range!r}, for {self}")
        try:
            return allocate(length)
        except (MemoryError, OverflowError) as error:
            raise UnexpectedAnswerError(f"the answer announces {length} bytes") from error

    def _is_answered(self, length: int, content_range: str) -> bool:
        exact = None if self.end is None else self.end + 1 - self.start
        if not content_range:
            return self.is_whole or length == exact
        found = _CONTENT_RANGE.fullmatch(content_range)
        if found is None or int(found[1]) != self.start or int(found[2]) + 1 - self.start != length:
            return False
        is_end = found[3] == str(self.start + length)
        return length == exact or (is_end and (exact is None or length < exact))


@dataclass(slots=True)
class _Get:
    """The GET in progress. `room` is None until the head has arrived."""

    asked: ByteRange
    moved: Callable[[], None]
    allocate: Allocate
    answer: asyncio.Future[memoryview]
    room: memoryview | None = None
    filled: int = 0
    noted: int = 0
    """The bytes that were noted as progress."""
    stays_open: bool = False
    """Whether only an answer to another GET can follow on this connection."""


class RangeConnection(asyncio.BufferedProtocol):
    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._get: _Get | None = None
        self._head = memoryview(bytearray(MAX_HEAD_BYTES))
        self._head_filled = 0

    @property
    def is_usable(self) -> bool:
        """Whether the connection is open, and no GET is in progress."""
        return self._transport is not None and not self._transport.is_closing() and self._get is None

    async def get(self, request: bytes, asked: ByteRange, moved: Callable[[], None], allocate: Allocate) -> memoryview:
        """Sends `request`, a whole GET of the range, and returns the bytes, in memory of `allocate`.

        `moved` is called for the head and for each piece of the body.

        Raises `UnansweredError`, `LostConnectionError`, `UnexpectedAnswerError` and `OtherAnswerError`."""
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

    def abort(self, error: Exception | None = None) -> None:
        """Closes at once. A GET in progress raises `error`, by default `LostConnectionError`."""
        get, self._get = self._get, None
        if get is not None and not get.answer.done():
            get.answer.set_exception(error or LostConnectionError("the connection was closed"))
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        said = "the store closed the connection" if exc is None else f"{type(exc).__name__}: {exc}"
        if self._get is not None and self._get.room is not None:
            self.abort(LostConnectionError(f"{said} after {self._get.filled} of {len(self._get.room)} bytes"))
        elif self._head_filled:
            self.abort(LostConnectionError(f"{said} in the head of its answer"))
        else:
            self.abort(UnansweredError(said))

    def get_buffer(self, sizehint: int) -> memoryview:
        get = self._get
        if get is None or get.room is None:
            return self._head[self._head_filled :]
        return get.room[get.filled :]

    def buffer_updated(self, nbytes: int) -> None:
        get = self._get
        if get is None:
            self.abort()  # the store sends bytes that answer no request
            return
        try:
            if get.room is None:
                self._on_head(get, nbytes)
            else:
                self._on_body(get, get.room, nbytes)
        except Exception as error:
            self.abort(error)

    def _on_head(self, get: _Get, nbytes: int) -> None:
        self._head_filled += nbytes
        head, end, early = bytes(self._head[: self._head_filled]).partition(_HEAD_END)
        if not end:
            if self._head_filled == MAX_HEAD_BYTES:
                raise OtherAnswerError(0)
            return
        get.moved()
        length, content_range, stays_open = _parse(head, get.asked)
        room = get.room = get.asked.destination(length, content_range, get.allocate)
        get.stays_open = stays_open and len(early) <= len(room)
        taken = min(len(early), len(room))
        room[:taken] = early[:taken]
        self._on_body(get, room, taken)

    def _on_body(self, get: _Get, room: memoryview, nbytes: int) -> None:
        get.filled += nbytes
        if get.filled - get.noted >= PIECE_BYTES:
            get.noted = get.filled
            get.moved()
        if get.filled < len(room):
            return
        self._get = None
        self._head_filled = 0
        if not get.stays_open:
            self.abort()
        if not get.answer.done():
            get.answer.set_result(room)


def _parse(head: bytes, asked: ByteRange) -> tuple[int, str, bool]:
    """Returns the length, the field Content-Range or "", and whether the connection stays open.

    Raises `OtherAnswerError`."""
    status_line, *lines = head.split(b"\r\n")
    status = _STATUS_LINE.fullmatch(status_line)
    if status is None or int(status[2]) != (_OK if asked.is_whole else _PARTIAL):
        raise OtherAnswerError(0 if status is None else int(status[2]))
    fields: dict[bytes, bytes] = {}
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise OtherAnswerError(0)
        name, value = field[1].lower(), field[2].rstrip()
        fields[name] = fields[name] + b"," + value if name in fields else value
    length = fields.get(b"content-length", b"")
    if b"transfer-encoding" in fields or not _NUMBER.fullmatch(length):
        raise OtherAnswerError(int(status[2]))
    stays_open = status[1] == b"1" and fields.get(b"connection", b"keep-alive").lower() == b"keep-alive"
    return int(length), fields.get(b"content-range", b"").decode("latin-1"), stays_open
