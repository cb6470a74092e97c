"""Patches a large Fetch response while it streams through, without holding or copying record bytes.

The frame's length leaves the proxy before the first partition arrives, so every patch keeps the size of its field. The
patcher overwrites offsets and error codes in place. It overwrites the session id as well; the caller must choose the
id in advance, because it precedes all partitions. Other addresses in NodeEndpoints would change the length, so the
patcher instead gives that field a tag number that clients skip (docs/semantics.md 2.2).
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import NamedTuple, Protocol

from protocol.apis.fetch.request import FLEXIBLE_FROM, MAX_VERSION, MIN_VERSION
from protocol.apis.fetch.response import (
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
from protocol.apis.fetch.response_stream import StreamedResponse, checked_count
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
"""The tag number that hides NodeEndpoints: the highest number of one byte."""

MAX_GROUP_BYTES = 40_000
"""A limit above the longest group, which is that of a topic: its name has at most 32,767 bytes."""

_HEAD_V4 = Struct(">ihqqi")
_HEAD_V5 = Struct(">ihqqqi")
_HEAD_V12 = Struct(">ihqqqB")
_PREFERRED_READ_REPLICA = INT32
_ABORTED_TRANSACTION_BYTES = 16


class PartitionHead(NamedTuple):
    """The broker's answer for one partition, without its records. In version 4, the log start offset is -1."""

    topic: TopicReference
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int


class PartitionPatch(NamedTuple):
    """New values for fields of one partition; None keeps the broker's value.

    `log_start_offset` has no effect in version 4, which has no such field."""

    error_code: int | None = None
    high_watermark: int | None = None
    last_stable_offset: int | None = None
    log_start_offset: int | None = None


class PartitionPatches(Protocol):
    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        """Returns the patch for one partition; None leaves the partition unchanged.

        The patcher calls this once per partition, in wire order, before the partition's records arrive.
        """


class StreamingFetchPatcher(StreamedResponse):
    """Patches one response. The caller feeds its payload, response header included, in chunks of any size.

    Malformed bytes raise `ProtocolError`. The caller must then close the connection, because the bytes returned before
    have already left.
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
            raise ProtocolError(f"the proxy does not decode Fetch version {version}")
        self.out_of_range: list[PartitionHead] = []
        """The partitions that the broker answered with OFFSET_OUT_OF_RANGE, including those with a patch."""
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
            raise TruncatedError(f"a partition at {start} exceeds the {len(buf)} bytes that have arrived")
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
                raise ProtocolError(f"a partition has records of {length} bytes")
        self._partitions_left -= 1
        end = pos + max(length, 0)
        if self._compact and end < len(buf) and buf[end] == 0:
            # The rest of the partition has arrived and has no tagged fields, so one step replaces three.
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
            # The first byte of a uvarint has the low seven bits, however many bytes follow.
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
        """Reads an array's length. Does not compare it with the bytes that remain, because more bytes will arrive."""
        if self._compact:
            count, pos = read_uvarint(buf, pos)
            count -= 1
        else:
            count, pos = read_int32(buf, pos)
        return max(checked_count(count), 0), pos
