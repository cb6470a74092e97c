"""Frames on a byte stream: an int32 length, then as many bytes of payload (docs/semantics.md 1.1).

`FrameTracker` follows a stream without buffering bodies, so that opaque frames can be forwarded as they arrive. It
only keeps the head of a frame that arrives in pieces. It accepts bytes split at any position. After an error it is
unusable, because the stream has lost its frame borders.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.errors import FrameSizeError, HttpError, TlsHandshakeError
from protocol.primitives import INT32, Buffer

LENGTH_BYTES = 4
REQUEST_HEAD_BYTES = 8
"""The size of the API key, the API version and the correlation id, which begin a request payload."""
RESPONSE_HEAD_BYTES = 4
"""The size of the correlation id, which begins a response payload."""
MAX_REQUEST_BYTES = 104_857_600
"""Kafka's default for `socket.request.max.bytes`."""
MAX_INT32 = 0x7FFF_FFFF
_TLS_RECORDS = (0x1603, 0x1503)
"""The first two bytes of a TLS stream: a client's hello, or the alert that a TLS listener sends on plain text."""
_HTTP_MESSAGES = frozenset(
    int.from_bytes(begin, "big") for begin in (b"GET ", b"HEAD", b"POST", b"PUT ", b"OPTI", b"CONN", b"PRI ", b"HTTP")
)
"""The first four bytes of an HTTP stream. As lengths, they are above 1 GiB, which no first frame has."""


def begins_http(size: int) -> bool:
    """Whether the first length of a stream is the begin of an HTTP message."""
    return size in _HTTP_MESSAGES


class FramePart(NamedTuple):
    """Consecutive bytes of one frame, as on the wire."""

    data: memoryview
    """Aliases the buffer that was fed, except for a head that arrived in pieces.

    The first part of a frame begins with the length prefix."""
    is_start: bool
    remaining: int
    """Payload bytes of this frame that come after this part; 0 when the frame ends here."""
    size: int
    """The size of the whole payload in bytes."""


class FrameTracker:
    """Cuts a stream into parts of frames.

    The first part of a frame holds the length prefix and at least `head_bytes` of the payload. If the payload is
    shorter than `head_bytes`, the first part holds all of it.
    """

    __slots__ = ("_head_bytes", "_limit", "_max_frame_bytes", "_pending", "_remaining", "_size", "_started")

    def __init__(self, head_bytes: int, max_frame_bytes: int = MAX_INT32, limit: str = "") -> None:
        """`limit` names the setting that has `max_frame_bytes`, for the error."""
        self._limit = f" ({limit})" if limit else ""
        self._head_bytes = head_bytes
        self._max_frame_bytes = max_frame_bytes
        self._pending = bytearray()
        self._remaining = 0
        self._size = 0
        self._started = False

    @property
    def is_between_frames(self) -> bool:
        """Whether the stream may end here without cutting a frame."""
        return not self._remaining and not self._pending

    @property
    def remaining(self) -> int:
        """The payload bytes of the current frame that are still to come, once its first part was returned."""
        return self._remaining

    def skip(self, count: int) -> None:
        """Goes on behind `count` bytes that were not fed. They are at most `remaining`."""
        self._remaining -= count

    def feed(self, data: Buffer) -> list[FramePart]:
        """Returns the parts that `data` holds, in order; no part is empty. Raises `FrameSizeError`.

        When a length is bad, the caller also loses the frames before it in `data`: the connection must close anyway.
        """
        view = data if type(data) is memoryview else memoryview(data)
        available = len(view)
        if available <= self._remaining:
            if not available:
                return []
            self._remaining -= available
            return [FramePart(view, False, self._remaining, self._size)]
        parts: list[FramePart] = []
        pos = 0
        if self._remaining:
            pos = self._remaining
            parts.append(FramePart(view[:pos], False, 0, self._size))
            self._remaining = 0
        elif self._pending:
            pos = self._complete_head(view, parts)
        while pos < available and not self._remaining:
            body = pos + LENGTH_BYTES
            if body > available:
                self._pending += view[pos:]
                break
            size = INT32.unpack_from(view, pos)[0]
            if not self._started or not 0 <= size <= self._max_frame_bytes:
                self._check_size(size)
            end = body + size
            if end > available:
                end = available
                if end - body < self._head_bytes and end - body < size:
                    self._size = size
                    self._pending += view[pos:]
                    break
                self._remaining = body + size - end
                self._size = size
            parts.append(FramePart(view[pos:end], True, self._remaining, size))
            pos = end
        return parts

    def _complete_head(self, view: memoryview, parts: list[FramePart]) -> int:
        pending = self._pending
        pos = 0
        if len(pending) < LENGTH_BYTES:
            pos = min(LENGTH_BYTES - len(pending), len(view))
            pending += view[:pos]
            if len(pending) < LENGTH_BYTES:
                return pos
            self._size = INT32.unpack_from(pending)[0]
            self._check_size(self._size)
        head = min(self._head_bytes, self._size)
        take = min(LENGTH_BYTES + head - len(pending), len(view) - pos)
        pending += view[pos : pos + take]
        pos += take
        if len(pending) < LENGTH_BYTES + head:
            return pos
        self._remaining = self._size - head
        parts.append(FramePart(memoryview(bytes(pending)), True, self._remaining, self._size))
        pending.clear()
        if self._remaining and pos < len(view):
            take = min(self._remaining, len(view) - pos)
            self._remaining -= take
            parts.append(FramePart(view[pos : pos + take], False, self._remaining, self._size))
            pos += take
        return pos

    def _check_size(self, size: int) -> None:
        if not self._started:
            self._started = True
            if size >> 16 in _TLS_RECORDS:
                raise TlsHandshakeError("the peer speaks TLS where plain text was expected")
            if begins_http(size):
                raise HttpError("the peer speaks HTTP where Kafka's protocol was expected")
        if size < 0:
            raise FrameSizeError(f"a frame with the negative length {size}")
        if size > self._max_frame_bytes:
            raise FrameSizeError(
                f"a frame of {size} bytes, above the limit of {self._max_frame_bytes} bytes{self._limit}"
            )


def frame_length(*payload: Buffer) -> bytes:
    """Returns the length prefix of a frame whose payload consists of these buffers."""
    return INT32.pack(len(payload[0]) if len(payload) == 1 else sum(map(len, payload)))
