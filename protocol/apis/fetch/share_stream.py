"""Removes the broker addresses from a large ShareFetch response (KIP-932) while it streams through.

In ShareFetch, NodeEndpoints is not a tagged field but the last array of the body. The frame's length has left the proxy
before that array arrives, so the response must keep its size. The patcher therefore empties the array and fills the
freed bytes with an unknown tagged field, which clients skip. The client then finds the leader by Metadata, as it does
when a broker sends no endpoints. The patcher holds only the bytes after the records of the last partition.
"""

from __future__ import annotations

from protocol.apis.fetch.response_stream import StreamedResponse, checked_count
from protocol.errors import ProtocolError
from protocol.primitives import (
    INT16,
    INT32,
    INT64,
    Buffer,
    read_array_length,
    read_string_bounds,
    read_tag_count,
    read_uvarint,
    skip_tagged_section,
    write_uvarint,
)

MAX_GROUP_BYTES = 256 * 1024
"""A limit above the size of a thousand brokers' endpoints, and above two error messages of 32,767 bytes."""

FILLER_TAGS = (127, 16_383)
"""The highest tag numbers of one and of two bytes. With one of them, the filler takes exactly the free bytes."""

_UUID_BYTES = 16
_ACQUIRED_RECORDS_BYTES = 2 * INT64.size + INT16.size
_NO_ELEMENTS = b"\x01"


class StreamingShareFetchPatcher(StreamedResponse):
    """Patches one response of version 1 or 2.

    Malformed bytes raise `ProtocolError`. The caller must then close the connection, because the bytes returned before
    have already left.
    """

    def __init__(self) -> None:
        super().__init__("ShareFetch", MAX_GROUP_BYTES)
        self._step = self._read_top
        self._topics_left = 0
        self._partitions_left = 0
        self._acquired_left = 0

    def _read_top(self, buf: Buffer, pos: int) -> int:
        pos = skip_tagged_section(buf, pos + INT32.size)
        pos = _skip_string(buf, pos + INT32.size + INT16.size)
        self._topics_left, pos = _read_count(buf, pos + INT32.size)
        self._next_topic()
        return pos

    def _read_topic(self, buf: Buffer, pos: int) -> int:
        self._partitions_left, pos = _read_count(buf, pos + _UUID_BYTES)
        self._next_partition()
        return pos

    def _read_partition(self, buf: Buffer, pos: int) -> int:
        pos = _skip_string(buf, pos + INT32.size + INT16.size)
        pos = _skip_string(buf, pos + INT16.size)
        pos = skip_tagged_section(buf, pos + 2 * INT32.size)
        length, pos = read_uvarint(buf, pos)
        self._passing_bytes = max(length - 1, 0)
        self._step = self._read_acquired_count
        return pos

    def _read_acquired_count(self, buf: Buffer, pos: int) -> int:
        self._acquired_left, pos = _read_count(buf, pos)
        self._next_acquired()
        return pos

    def _read_acquired(self, buf: Buffer, pos: int) -> int:
        pos = skip_tagged_section(buf, pos + _ACQUIRED_RECORDS_BYTES)
        self._acquired_left -= 1
        self._next_acquired()
        return pos

    def _next_acquired(self) -> None:
        self._step = self._read_acquired if self._acquired_left else self._end_partition

    def _end_partition(self, buf: Buffer, pos: int) -> int:
        pos = skip_tagged_section(buf, pos)
        self._partitions_left -= 1
        self._next_partition()
        return pos

    def _next_partition(self) -> None:
        self._step = self._read_partition if self._partitions_left else self._end_topic

    def _end_topic(self, buf: Buffer, pos: int) -> int:
        pos = skip_tagged_section(buf, pos)
        self._topics_left -= 1
        self._next_topic()
        return pos

    def _next_topic(self) -> None:
        self._step = self._read_topic if self._topics_left else self._read_tail

    def _read_tail(self, buf: Buffer, start: int) -> int:
        """Reads the endpoints and the tagged fields of the body."""
        count, pos = read_array_length(buf, start, compact=True)
        for _ in range(count):
            pos = _skip_string(buf, pos + INT32.size)
            pos = _skip_string(buf, pos + INT32.size)
            pos = skip_tagged_section(buf, pos)
        end = skip_tagged_section(buf, pos)
        if count > 0:
            self._edits.append((start, _without_endpoints(buf, start, pos, end)))
        self._finish()
        return end


def _without_endpoints(buf: Buffer, start: int, tags_at: int, end: int) -> bytes:
    """Returns a replacement for `[start, end)` of the same length, without endpoints.

    `tags_at` is the position of the body's tagged section. Raises `ProtocolError` when no filler fits.
    """
    tag_count, tags_start = read_tag_count(buf, tags_at)
    head = _NO_ELEMENTS + write_uvarint(tag_count + 1) + bytes(buf[tags_start:end])
    free = end - start - len(head)
    for tag in FILLER_TAGS:
        room = free - len(write_uvarint(tag))
        for size_bytes in range(1, 6):
            size = write_uvarint(max(room - size_bytes, 0))
            if len(size) == size_bytes and room >= size_bytes:
                return head + write_uvarint(tag) + size + bytes(room - size_bytes)
    raise ProtocolError(f"cannot replace endpoints of {tags_at - start} bytes by a tagged field")


def _skip_string(buf: Buffer, pos: int) -> int:
    start, end = read_string_bounds(buf, pos, compact=True)
    return start if end < 0 else end


def _read_count(buf: Buffer, pos: int) -> tuple[int, int]:
    """Reads an array's length. Does not compare it with the bytes that remain, because more bytes will arrive."""
    count, end = read_uvarint(buf, pos)
    return max(checked_count(count - 1), 0), end
