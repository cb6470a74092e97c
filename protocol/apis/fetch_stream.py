"""A large Fetch response, patched by equal length while it streams through: record bytes are never held or copied.

The frame's length left before the first partition was seen, so every patch keeps its field's size: offsets and error
codes in place, the session id (which precedes all partitions, so it is decided beforehand), and the NodeEndpoints tag,
whose content would change its length, under a tag number that clients skip (semantics 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple, Protocol

from protocol.apis.fetch_request import FLEXIBLE_FROM, MAX_VERSION, MIN_VERSION
from protocol.apis.fetch_response import (
    ERROR_CODE_AT,
    HIGH_WATERMARK_AT,
    LAST_STABLE_OFFSET_AT,
    LOG_START_OFFSET_AT,
    LOG_START_OFFSET_FROM,
    NODE_ENDPOINTS_FROM,
    NODE_ENDPOINTS_TAG,
    PREFERRED_READ_REPLICA_FROM,
    SESSION_FROM,
    UNKNOWN_OFFSET,
)
from protocol.apis.response_stream import StreamedResponse, checked_count
from protocol.apis.topic_reference import TopicReference, read_topic_reference
from protocol.errors import ErrorCode, ProtocolError, TruncatedError
from protocol.primitives import (
    INT16,
    INT32,
    INT64,
    Buffer,
    read_int32,
    read_tag_count,
    read_uvarint,
    skip_tagged_section,
)

UNKNOWN_TAG = 127
"""What NodeEndpoints becomes: the highest number of one byte."""

MAX_GROUP_BYTES = 40_000
"""Above the longest group, a topic's: a name has at most 32,767 bytes."""

_HEAD_V4 = Struct(">ihqqi")
_HEAD_V5 = Struct(">ihqqqi")
_HEAD_V12 = Struct(">ihqqqB")
_PREFERRED_READ_REPLICA = INT32
_ABORTED_TRANSACTION_BYTES = 16


class PartitionHead(NamedTuple):
    """What the broker answered for one partition, but for its records; the log start is -1 in version 4."""

    topic: TopicReference
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


class PartitionPatch(NamedTuple):
    """New values of fixed-size fields; None keeps the broker's. Version 4 has no log start offset to patch."""

    error_code: int | None = None
    high_watermark: int | None = None
    last_stable_offset: int | None = None
    log_start_offset: int | None = None


class PartitionPatches(Protocol):
    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        """Asked once per partition in wire order, before its records; None lets it pass."""


class StreamingFetchPatcher(StreamedResponse):
    """One response; fed with its payload, response header included, in whatever chunks it arrives.

    Any malformed byte raises `ProtocolError`: what was returned before has left, so the connection must close.
    """

    def __init__(
        self,
        version: int,
        patches: PartitionPatches,
        *,
        session_id: int | None = None,
        hide_node_endpoints: bool = False,
    ) -> None:
        super().__init__("Fetch", MAX_GROUP_BYTES)
        if not MIN_VERSION <= version <= MAX_VERSION:
            raise ProtocolError(f"Fetch version {version}")
        self.out_of_range: list[PartitionHead] = []
        """The partitions that the broker answered OFFSET_OUT_OF_RANGE, whatever they were patched to."""
        self._version = version
        self._compact = version >= FLEXIBLE_FROM
        self._patches = patches
        self._session_id = session_id
        self._hides_node_endpoints = hide_node_endpoints and version >= NODE_ENDPOINTS_FROM
        self._head = _HEAD_V12 if self._compact else _HEAD_V5 if version >= LOG_START_OFFSET_FROM else _HEAD_V4
        self._step = self._read_top
        self._topic: TopicReference = ""
        self._topics_left = 0
        self._partitions_left = 0
        self._aborted_left = 0
        self._tags_left = 0
        self._after_tags: Callable[[], None] = self._finish

    def _read_top(self, buf: Buffer, pos: int) -> int:
        pos += INT32.size
        if self._compact:
            pos = skip_tagged_section(buf, pos)
        _, pos = read_int32(buf, pos)
        session_at = pos + INT16.size
        if self._version >= SESSION_FROM:
            pos = session_at + INT32.size
        self._topics_left, pos = self._read_count(buf, pos)
        if self._session_id is not None and self._version >= SESSION_FROM:
            self._edits.append((session_at, INT32.pack(self._session_id)))
        self._next_topic()
        return pos

    def _read_topic(self, buf: Buffer, pos: int) -> int:
        topic, pos = read_topic_reference(buf, pos, self._version)
        self._partitions_left, pos = self._read_count(buf, pos)
        self._topic = topic
        self._next_partition()
        return pos

    def _read_partition(self, buf: Buffer, start: int) -> int:
        pos = start + self._head.size
        if pos > len(buf):
            raise TruncatedError(f"a partition at {start} of {len(buf)} bytes")
        if self._version >= LOG_START_OFFSET_FROM:
            index, error_code, high_watermark, last_stable, log_start, aborted = self._head.unpack_from(buf, start)
        else:
            index, error_code, high_watermark, last_stable, aborted = self._head.unpack_from(buf, start)
            log_start = UNKNOWN_OFFSET
        if self._compact:
            if aborted > 0x7F:
                aborted, pos = read_uvarint(buf, pos - 1)
            aborted -= 1
        if aborted > 0:
            self._aborted_left = checked_count(aborted)
            if self._compact:
                self._step = self._read_aborted_transaction
            else:
                self._passing_bytes = aborted * _ABORTED_TRANSACTION_BYTES
                self._step = self._read_records_length
        else:
            checked_count(aborted)
            pos = self._read_records_length(buf, pos)
        self._patch(buf, start, PartitionHead(self._topic, index, error_code, high_watermark, last_stable, log_start))
        return pos

    def _patch(self, buf: Buffer, start: int, head: PartitionHead) -> None:
        if head.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            self.out_of_range.append(head)
        patch = self._patches.partition(head)
        if patch is None:
            return
        edits = self._edits
        if patch.error_code is not None:
            edits.append((start + ERROR_CODE_AT, INT16.pack(patch.error_code)))
        if patch.high_watermark is not None:
            edits.append((start + HIGH_WATERMARK_AT, INT64.pack(patch.high_watermark)))
        if patch.last_stable_offset is not None:
            edits.append((start + LAST_STABLE_OFFSET_AT, INT64.pack(patch.last_stable_offset)))
        if patch.log_start_offset is not None and self._version >= LOG_START_OFFSET_FROM:
            edits.append((start + LOG_START_OFFSET_AT, INT64.pack(patch.log_start_offset)))

    def _read_aborted_transaction(self, buf: Buffer, pos: int) -> int:
        pos = skip_tagged_section(buf, pos + _ABORTED_TRANSACTION_BYTES)
        self._aborted_left -= 1
        if not self._aborted_left:
            self._step = self._read_records_length
        return pos

    def _read_records_length(self, buf: Buffer, pos: int) -> int:
        if self._version >= PREFERRED_READ_REPLICA_FROM:
            pos += _PREFERRED_READ_REPLICA.size
        if self._compact:
            length, pos = read_uvarint(buf, pos)
            length -= 1
        else:
            length, pos = read_int32(buf, pos)
            if length < -1:
                raise ProtocolError(f"records of {length} bytes")
        self._partitions_left -= 1
        end = pos + max(length, 0)
        if self._compact and end < len(buf) and buf[end] == 0:
            # All of it is there and nothing is tagged: one step instead of three.
            self._next_partition()
            return end + 1
        self._passing_bytes = end - pos
        if self._compact:
            self._after_tags = self._next_partition
            self._step = self._read_tag_count
        else:
            self._next_partition()
        return pos

    def _read_tag_count(self, buf: Buffer, pos: int) -> int:
        self._tags_left, pos = read_tag_count(buf, pos)
        self._next_tag()
        return pos

    def _read_tag(self, buf: Buffer, start: int) -> int:
        tag, pos = read_uvarint(buf, start)
        size, pos = read_uvarint(buf, pos)
        in_body = self._after_tags == self._finish
        if in_body and tag == NODE_ENDPOINTS_TAG and self._hides_node_endpoints:
            # Its first byte has the low seven bits, however many follow.
            self._edits.append((start, bytes((buf[start] | UNKNOWN_TAG,))))
        self._passing_bytes = size
        self._tags_left -= 1
        self._next_tag()
        return pos

    def _next_tag(self) -> None:
        if self._tags_left:
            self._step = self._read_tag
        else:
            self._after_tags()

    def _next_partition(self) -> None:
        if self._partitions_left:
            self._step = self._read_partition
        elif self._compact:
            self._after_tags = self._next_topic
            self._step = self._read_tag_count
        else:
            self._next_topic()

    def _next_topic(self) -> None:
        self._topics_left -= 1
        if self._topics_left >= 0:
            self._step = self._read_topic
        elif self._compact:
            self._after_tags = self._finish
            self._step = self._read_tag_count
        else:
            self._finish()

    def _read_count(self, buf: Buffer, pos: int) -> tuple[int, int]:
        """Not held against the bytes that remain: they have not arrived yet."""
        if self._compact:
            count, pos = read_uvarint(buf, pos)
            count -= 1
        else:
            count, pos = read_int32(buf, pos)
        return max(checked_count(count), 0), pos
