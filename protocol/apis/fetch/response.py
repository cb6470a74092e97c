"""Parses Fetch responses of versions 4 to 18 and rebuilds them around the broker's own bytes (docs/semantics.md 2.2).

`parse_fetch_response` decodes the fields that decisions need and notes their positions. `rebuild_response` replaces
whole partition entries and patches fixed fields. All other bytes, unknown tags included, stay slices of the payload.
Record bytes are never copied, so the slices keep the payload alive.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from struct import Struct
from typing import NamedTuple

from protocol.apis.fetch.request import FLEXIBLE_FROM, MAX_VERSION, MIN_VERSION
from protocol.apis.topic_reference import TopicReference, read_topic_reference
from protocol.errors import ErrorCode, ProtocolError, TruncatedError
from protocol.primitives import (
    INT32,
    INT64,
    Buffer,
    read_array_length,
    read_tag,
    read_tag_count,
    read_uvarint,
    skip_tagged_section,
    skip_tags,
    write_uvarint,
)
from protocol.splice import Splice
from protocol.steps import Stepped, Steps

UNKNOWN_OFFSET = -1
NO_PREFERRED_READ_REPLICA = -1

ERROR_CODE_AT = 4
HIGH_WATERMARK_AT = 6
LAST_STABLE_OFFSET_AT = 14
LOG_START_OFFSET_AT = 22
"""The positions of fields in a partition entry, the same in every version that has the field."""

LOG_START_OFFSET_FROM = 5
SESSION_FROM = 7
PREFERRED_READ_REPLICA_FROM = 11
NODE_ENDPOINTS_FROM = 16

NODE_ENDPOINTS_TAG = 0
DIVERGING_EPOCH_TAG = 0
CURRENT_LEADER_TAG = 1

_TOP_V7 = Struct(">ihi")
_SESSION_ID_AT = 6
_EPOCH_AND_END_OFFSET = Struct(">iq")
_LEADER_ID_AND_EPOCH = Struct(">ii")
_PRODUCER_ID_AND_FIRST_OFFSET = Struct(">qq")

# The layouts of a partition up to the length of its records, if its aborted transactions are null or empty.
_ENTRY_V4 = Struct(">ihqqii")
_ENTRY_V5 = Struct(">ihqqqii")
_ENTRY_V11 = Struct(">ihqqqiii")
_ENTRY_V12 = Struct(">ihqqqBiB")
_ABORTED_AT_V4 = LOG_START_OFFSET_AT
_ABORTED_AT_V5 = LOG_START_OFFSET_AT + 8


class AbortedTransaction(NamedTuple):
    producer_id: int
    first_offset: int


class EpochEndOffset(NamedTuple):
    epoch: int
    end_offset: int


class LeaderIdAndEpoch(NamedTuple):
    leader_id: int
    leader_epoch: int


class FetchResponsePartition(NamedTuple):
    """One partition entry at `[start, end)` of the payload, including its tagged section.

    `log_start_offset` is -1 in version 4. `preferred_read_replica` is -1 before version 11. Null records count as
    empty.
    """

    topic: TopicReference
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    preferred_read_replica: int
    aborted_position: int
    """The position of the length of the array of aborted transactions."""
    records_start: int
    records_end: int
    """From version 12 on, the tagged section begins here."""
    start: int
    end: int

    @property
    def records_bytes(self) -> int:
        return self.records_end - self.records_start


class FetchResponse(NamedTuple):
    """A parsed response. Positions are absolute in `payload`. The response references `payload`, without a copy."""

    payload: memoryview
    version: int
    body_position: int
    throttle_time_ms: int
    error_code: int
    session_id: int
    """0 in versions before 7."""
    partitions: list[FetchResponsePartition]
    tags_position: int
    """The position of the body's own tagged section, which holds NodeEndpoints.

    Equals the payload's length before version 12."""

    def records(self, partition: FetchResponsePartition) -> memoryview:
        return self.payload[partition.records_start : partition.records_end]

    def aborted_transactions(self, partition: FetchResponsePartition) -> tuple[AbortedTransaction, ...] | None:
        """Returns the aborted transactions; None when the broker sent null, as it does under read_uncommitted."""
        compact = self.version >= FLEXIBLE_FROM
        count, pos = read_array_length(self.payload, partition.aborted_position, compact)
        if count < 0:
            return None
        aborted = []
        for _ in range(count):
            aborted.append(AbortedTransaction._make(_PRODUCER_ID_AND_FIRST_OFFSET.unpack_from(self.payload, pos)))
            pos += _PRODUCER_ID_AND_FIRST_OFFSET.size
            if compact:
                pos = skip_tagged_section(self.payload, pos)
        return tuple(aborted)

    def diverging_epoch(self, partition: FetchResponsePartition) -> EpochEndOffset | None:
        value = self._tag(partition, DIVERGING_EPOCH_TAG, _EPOCH_AND_END_OFFSET)
        return None if value is None else EpochEndOffset._make(value)

    def current_leader(self, partition: FetchResponsePartition) -> LeaderIdAndEpoch | None:
        value = self._tag(partition, CURRENT_LEADER_TAG, _LEADER_ID_AND_EPOCH)
        return None if value is None else LeaderIdAndEpoch._make(value)

    def node_endpoints_bounds(self) -> tuple[int, int] | None:
        """Returns `(start, end)` of the content of NodeEndpoints; None when the broker did not send that field."""
        if self.version < NODE_ENDPOINTS_FROM:
            return None
        return find_tag(self.payload, self.tags_position, NODE_ENDPOINTS_TAG)

    def _tag(self, partition: FetchResponsePartition, tag: int, layout: Struct) -> tuple[int, ...] | None:
        if self.version < FLEXIBLE_FROM:
            return None
        bounds = find_tag(self.payload, partition.records_end, tag)
        if bounds is None:
            return None
        if bounds[1] - bounds[0] < layout.size:
            raise TruncatedError(f"the content of tag {tag} of {bounds[1] - bounds[0]} bytes is too short")
        return layout.unpack_from(self.payload, bounds[0])


def find_tag(buf: Buffer, pos: int, wanted: int) -> tuple[int, int] | None:
    """Returns `(start, end)` of a tagged field's content in the section at `pos`; None when it has no such field."""
    count, pos = read_tag_count(buf, pos)
    for _ in range(count):
        tag, _, start, pos = read_tag(buf, pos)
        if tag == wanted:
            return start, pos
    return None


@Stepped
def parse_fetch_response(payload: Buffer, body_position: int, version: int) -> Steps[FetchResponse]:
    """Parses the payload. Raises `ProtocolError` if it is malformed for that version or has trailing bytes."""
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise ProtocolError(f"the proxy does not decode Fetch version {version}")
    view = memoryview(payload)
    compact = version >= FLEXIBLE_FROM
    error_code = session_id = 0
    partitions: list[FetchResponsePartition] = []
    try:
        if version >= SESSION_FROM:
            throttle_time_ms, error_code, session_id = _TOP_V7.unpack_from(view, body_position)
            pos = body_position + _TOP_V7.size
        else:
            (throttle_time_ms,) = INT32.unpack_from(view, body_position)
            pos = body_position + INT32.size
        topic_count, pos = read_array_length(view, pos, compact)
        for _ in range(topic_count):
            topic, pos = read_topic_reference(view, pos, version)
            partition_count, pos = read_array_length(view, pos, compact)
            if compact:
                pos = yield from _walk_flexible(view, pos, partition_count, topic, partitions)
                pos = yield from skip_tags(view, pos)
            else:
                pos = yield from _walk_classic(view, pos, partition_count, version, topic, partitions)
        tags_position = pos
        if compact:
            pos = skip_tagged_section(view, pos)
    except (struct.error, IndexError) as error:
        raise TruncatedError(f"a field exceeds the Fetch response of {len(view)} bytes") from error
    if pos != len(view):
        raise ProtocolError(f"{len(view) - pos} bytes follow the end of a Fetch response")
    return FetchResponse(
        view, version, body_position, throttle_time_ms, error_code, session_id, partitions, tags_position
    )


def _walk_flexible(
    view: memoryview, pos: int, count: int, topic: TopicReference, partitions: list[FetchResponsePartition]
) -> Steps[int]:
    unpack = _ENTRY_V12.unpack_from
    append = partitions.append
    size = len(view)
    for _ in range(count):
        start = pos
        index, error_code, high_watermark, last_stable, log_start, aborted, preferred, records = unpack(view, pos)
        pos += 36
        if aborted > 1:
            pos = _skip_aborted(view, start + _ABORTED_AT_V5, compact=True)
            (preferred,) = INT32.unpack_from(view, pos)
            records, pos = read_uvarint(view, pos + INT32.size)
        elif records > 0x7F:
            records, pos = read_uvarint(view, pos - 1)
        records_end = pos + records - 1 if records else pos
        if records_end >= size:
            raise TruncatedError(f"records of {records - 1} bytes at {pos} exceed the response of {size} bytes")
        end = records_end + 1 if view[records_end] == 0 else (yield from skip_tags(view, records_end))
        append(
            FetchResponsePartition(
                topic,
                index,
                error_code,
                high_watermark,
                last_stable,
                log_start,
                preferred,
                start + _ABORTED_AT_V5,
                pos,
                records_end,
                start,
                end,
            )
        )
        pos = end
        yield
    return pos


def _walk_classic(
    view: memoryview,
    pos: int,
    count: int,
    version: int,
    topic: TopicReference,
    partitions: list[FetchResponsePartition],
) -> Steps[int]:
    preferred = NO_PREFERRED_READ_REPLICA
    log_start = UNKNOWN_OFFSET
    has_preferred = version >= PREFERRED_READ_REPLICA_FROM
    aborted_at = _ABORTED_AT_V5 if version >= LOG_START_OFFSET_FROM else _ABORTED_AT_V4
    for _ in range(count):
        start = pos
        if has_preferred:
            index, error_code, high_watermark, last_stable, log_start, aborted, preferred, records = (
                _ENTRY_V11.unpack_from(view, pos)
            )
            pos += _ENTRY_V11.size
        elif version >= LOG_START_OFFSET_FROM:
            index, error_code, high_watermark, last_stable, log_start, aborted, records = _ENTRY_V5.unpack_from(
                view, pos
            )
            pos += _ENTRY_V5.size
        else:
            index, error_code, high_watermark, last_stable, aborted, records = _ENTRY_V4.unpack_from(view, pos)
            pos += _ENTRY_V4.size
        if aborted > 0:
            pos = _skip_aborted(view, start + aborted_at, compact=False)
            if has_preferred:
                (preferred,) = INT32.unpack_from(view, pos)
                pos += INT32.size
            (records,) = INT32.unpack_from(view, pos)
            pos += INT32.size
        if aborted < -1 or records < -1:
            raise ProtocolError(
                f"the partition at {start} has {aborted} aborted transactions and {records} bytes of records"
            )
        end = pos + max(records, 0)
        if end > len(view):
            raise TruncatedError(f"records of {records} bytes at {pos} exceed the response of {len(view)} bytes")
        partitions.append(
            FetchResponsePartition(
                topic,
                index,
                error_code,
                high_watermark,
                last_stable,
                log_start,
                preferred,
                start + aborted_at,
                pos,
                end,
                start,
                end,
            )
        )
        pos = end
        yield
    return pos


def _skip_aborted(view: memoryview, pos: int, compact: bool) -> int:
    count, pos = read_array_length(view, pos, compact)
    if not compact:
        return pos + count * _PRODUCER_ID_AND_FIRST_OFFSET.size
    for _ in range(count):
        pos = skip_tagged_section(view, pos + _PRODUCER_ID_AND_FIRST_OFFSET.size)
    return pos


def without_records(
    response: FetchResponse, partition: FetchResponsePartition, log_start_offset: int | None = None
) -> list[Buffer]:
    """Returns the entry without its records and with `log_start_offset`; None keeps the broker's log start offset."""
    view = response.payload
    if response.version < FLEXIBLE_FROM:
        length_at, empty = partition.records_start - INT32.size, INT32.pack(0)
    else:
        length_at, empty = partition.records_start - len(write_uvarint(partition.records_bytes + 1)), b"\x01"
    head = bytearray(view[partition.start : length_at])
    if log_start_offset is not None and response.version >= LOG_START_OFFSET_FROM:
        INT64.pack_into(head, LOG_START_OFFSET_AT, log_start_offset)
    return [head, empty, view[partition.records_end : partition.end]]


@Stepped
def rebuild_response(
    response: FetchResponse,
    *,
    entries: Mapping[int, Sequence[Buffer]] | None = None,
    log_start_offsets: Mapping[int, int] | None = None,
    session_id: int | None = None,
    splices: Iterable[Splice] = (),
) -> Steps[list[Buffer]]:
    """Returns the payload with some entries replaced and some log start offsets patched.

    The keys of `entries` and `log_start_offsets` are indexes in `response.partitions`. `log_start_offsets` has no
    effect on an entry that `entries` replaces, nor in version 4, which has no such field. `splices` are further changes
    by position in the payload, such as those of node endpoints; they must lie outside the entries. The result holds
    slices of the payload and the buffers of the arguments, without a copy. Raises `ValueError` when changes overlap.
    """
    changes: list[tuple[int, int, Sequence[Buffer]]] = [(s.start, s.end, (s.replacement,)) for s in splices]
    if session_id is not None and response.version >= SESSION_FROM:
        position = response.body_position + _SESSION_ID_AT
        changes.append((position, position + INT32.size, (INT32.pack(session_id),)))
    entries = entries or {}
    for index, buffers in entries.items():
        replaced = response.partitions[index]
        changes.append((replaced.start, replaced.end, buffers))
    if log_start_offsets and response.version >= LOG_START_OFFSET_FROM:
        for index, log_start_offset in log_start_offsets.items():
            if index not in entries:
                position = response.partitions[index].start + LOG_START_OFFSET_AT
                changes.append((position, position + INT64.size, (INT64.pack(log_start_offset),)))
    changes.sort(key=lambda change: change[:2])
    view = response.payload
    out: list[Buffer] = []
    pos = 0
    for start, end, buffers in changes:
        if start < pos or end > len(view):
            raise ValueError(
                f"the change of [{start}, {end}) overlaps the one that ends at {pos} or exceeds {len(view)} bytes"
            )
        yield
        if start > pos:
            out.append(view[pos:start])
        out.extend(buffer for buffer in buffers if len(buffer))
        pos = end
    if pos < len(view):
        out.append(view[pos:])
    return out


def out_of_range(response: FetchResponse) -> list[int]:
    """Returns the indexes of the partitions that the broker answered with OFFSET_OUT_OF_RANGE."""
    wanted = ErrorCode.OFFSET_OUT_OF_RANGE.value
    return [index for index, partition in enumerate(response.partitions) if partition.error_code == wanted]
