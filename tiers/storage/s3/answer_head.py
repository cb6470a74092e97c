"""Parses the head of an HTTP/1.1 answer, and the chunks of an error document (RFC 9112). Bytes in, values out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

HEAD_END = b"\r\n\r\n"
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: [^\r\n]*)?")
_FIELD = re.compile(rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]+):[ \t]*([^\r\n\0]*)")
_NUMBER = re.compile(rb"[0-9]{1,18}")
_CONTENT_RANGE = re.compile(rb"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18}|\*)")
_CHUNK_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[^\r\n]*)?\r\n")


class MalformedAnswerError(Exception):
    """The bytes are no answer of HTTP/1.1, or one that is not understood."""


class ContentRange(NamedTuple):
    """The positions of the first and the last byte, both inclusive. `size` is the object's; None: unknown."""

    first: int
    last: int
    size: int | None


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What a client needs of a head.

    `length` is the Content-Length; None if there is none, or if the body comes in chunks. `content_range` is
    None if there is no such field."""

    status: int
    length: int | None
    is_chunked: bool
    content_range: ContentRange | None
    stays_open: bool
    """Whether the connection may be used again after this answer."""

    @property
    def is_interim(self) -> bool:
        """Whether another head follows (100 Continue, 103 Early Hints)."""
        return 100 <= self.status < 200 and self.status != 101

    @property
    def has_no_body(self) -> bool:
        return self.status in (204, 304) or self.length == 0

    @property
    def ends_with_connection(self) -> bool:
        """Whether the body ends where the connection does, because nothing else says where."""
        return self.length is None and not self.is_chunked


def parse_head(head: bytes) -> AnswerHead:
    """Returns the head. `head` ends before the empty line. Raises `MalformedAnswerError`."""
    status_line, *lines = head.split(b"\r\n")
    status = _STATUS_LINE.fullmatch(status_line)
    if status is None:
        raise MalformedAnswerError(f"no status line of HTTP/1.1: {status_line[:100]!r}")
    lengths: set[bytes] = set()
    is_chunked = False
    content_range = None
    connection = b""
    for line in lines:
        field = _FIELD.fullmatch(line)
        if field is None:
            raise MalformedAnswerError(f"no header field: {line[:100]!r}")
        name, value = field[1].lower(), field[2].rstrip()
        if name == b"content-length":
            lengths.add(value)
        elif name == b"transfer-encoding":
            if value.lower() != b"chunked" or is_chunked:
                raise MalformedAnswerError(f"the transfer encoding {value[:100]!r} is not supported")
            is_chunked = True
        elif name == b"content-range":
            content_range = _content_range(value)
        elif name == b"connection":
            connection += b"," + value.lower()
    options = [option.strip() for option in connection.split(b",")]
    stays_open = b"close" not in options and (status[1] == b"1" or b"keep-alive" in options)
    length = None if is_chunked else _length(lengths)
    return AnswerHead(int(status[2]), length, is_chunked, content_range, stays_open)


def _length(values: set[bytes]) -> int | None:
    if not values:
        return None
    if len(values) > 1 or not _NUMBER.fullmatch(value := values.pop()):
        raise MalformedAnswerError("the Content-Length is not one number")
    return int(value)


def _content_range(value: bytes) -> ContentRange | None:
    """Returns None for `bytes */SIZE`, which comes with status 416."""
    if value.startswith(b"bytes */"):
        return None
    found = _CONTENT_RANGE.fullmatch(value)
    if found is None:
        raise MalformedAnswerError(f"no Content-Range of bytes: {value[:100]!r}")
    return ContentRange(int(found[1]), int(found[2]), None if found[3] == b"*" else int(found[3]))


def dechunked(raw: bytes) -> tuple[bytes, bool]:
    """Returns the data of a body in chunks, as far as it has arrived, and whether `raw` is exactly the whole body.

    Raises `MalformedAnswerError`."""
    data = bytearray()
    position = 0
    while True:
        size_line = _CHUNK_SIZE.match(raw, position)
        if size_line is None:
            if b"\r\n" in raw[position:]:
                raise MalformedAnswerError(f"no size of a chunk: {raw[position : position + 40]!r}")
            return bytes(data), False
        size, begin = int(size_line[1], 16), size_line.end()
        if size == 0:
            return bytes(data), raw[begin:] == b"\r\n"  # with trailers, it is not used again
        data += raw[begin : begin + size]
        position = begin + size + 2
        if raw[begin + size : position] not in (b"\r\n", b"\r", b""):
            raise MalformedAnswerError("a chunk is longer than its size")
        if position > len(raw):
            return bytes(data), False
