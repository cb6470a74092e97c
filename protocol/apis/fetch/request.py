"""Parses Fetch requests of versions 4 to 18 and patches their bytes (docs/semantics.md 2.1).

The limits and the session fields have fixed positions before the topics, so this module patches them in place. It
builds a request for fewer partitions from the bytes of the entries that stay. It can patch the fetch offsets of those
entries in place. It re-encodes nothing.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from struct import Struct
from typing import NamedTuple

from protocol.apis.topic_reference import TopicReference, read_topic_reference
from protocol.errors import ProtocolError, TruncatedError
from protocol.primitives import (
    INT32,
    INT64,
    Buffer,
    check_items,
    read_array_length,
    read_int32,
    read_string_bounds,
    read_tag,
    read_tag_count,
    skip_tagged_section,
    skip_tags,
    write_array_length,
)
from protocol.steps import Stepped, Steps

FLEXIBLE_FROM = 12
MIN_VERSION = 4
MAX_VERSION = 18

CONSUMER_REPLICA_ID = -1
_FUTURE_REPLICA_ID = -3
NO_LEADER_EPOCH = -1
NO_SESSION_ID = 0
INITIAL_SESSION_EPOCH = 0
"""The session epoch of a full request that asks for a session."""
FINAL_SESSION_EPOCH = -1
"""The session epoch of a full request that wants no session and closes the session that it names."""

_SESSION_FROM = 7
_RACK_FROM = 11
_REPLICA_STATE_FROM = 15
_REPLICA_STATE_TAG = 1

_ENTRY_V4 = Struct(">iqi")
_ENTRY_V5 = Struct(">iqqi")
_ENTRY_V9 = Struct(">iiqqi")
_ENTRY_V12 = Struct(">iiqiqi")
_ENTRY_V12_WITHOUT_TAGS = Struct(">iiqiqix")
_FETCH_OFFSET_AT_V4 = 4
_FETCH_OFFSET_AT_V9 = 8
_LAST_FETCHED_EPOCH_AT = 16
_LIMITS_V7 = Struct(">iiibii")
_LIMITS_V4 = Struct(">iiib")


class FetchPartition(NamedTuple):
    """One partition entry at `[start, end)` of the payload, including its tagged section."""

    topic: TopicReference
    partition: int
    current_leader_epoch: int
    fetch_offset: int
    last_fetched_epoch: int
    partition_max_bytes: int
    start: int
    end: int


class FetchTopic(NamedTuple):
    """A topic entry at `[start, end)` of the payload.

    The request's partitions with the indexes `[first_partition, end_partition)` belong to it."""

    topic: TopicReference
    start: int
    partitions_position: int
    """The position of the partition array's length."""
    tail_position: int
    """The end of the last partition entry."""
    end: int
    first_partition: int
    end_partition: int


class FetchRequest(NamedTuple):
    """A parsed request. Positions are absolute in `payload`. The request references `payload` and does not copy it."""

    payload: Buffer
    version: int
    body_position: int
    replica_id: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    isolation_level: int
    session_id: int
    session_epoch: int
    topics: list[FetchTopic]
    partitions: list[FetchPartition]
    """In wire order, which is also the order of the byte budget."""
    forgotten: list[tuple[TopicReference, tuple[int, ...]]]
    topics_position: int
    forgotten_position: int
    """The position of the array of forgotten topics. Equals `forgotten_end` before version 7, which has no array."""
    forgotten_end: int

    @property
    def is_read_committed(self) -> bool:
        return self.isolation_level == 1

    @property
    def is_from_follower(self) -> bool:
        """Whether a broker sent the request, or it is for a future replica (docs/semantics.md 2.1).

        The remote tier never answers such a request.
        """
        return is_replica(self.replica_id)

    @property
    def is_full(self) -> bool:
        """Whether the request names all partitions that the client wants, rather than changes to a session."""
        return self.session_epoch <= INITIAL_SESSION_EPOCH

    def with_only(self, kept: Container[int], fetch_offsets: Mapping[int, int] | None = None) -> Steps[bytearray]:
        """Returns the request (header included) for the partitions with those indexes, without forgotten topics.

        The entries are copied verbatim. When `fetch_offsets` is given, each entry asks for the offset that
        `fetch_offsets` has for its index. The last fetched epoch belongs to the old offset, so it becomes -1.

        `patch_fetch_request` may patch the result further: everything before the topics keeps its position.
        """
        compact = self.version >= FLEXIBLE_FROM
        view = memoryview(self.payload)
        body = bytearray()
        topic_count = 0
        for topic in self.topics:
            entries = [p for p in range(topic.first_partition, topic.end_partition) if p in kept]
            if not entries:
                continue
            topic_count += 1
            body += view[topic.start : topic.partitions_position]
            body += write_array_length(len(entries), compact)
            for index in entries:
                entry = view[self.partitions[index].start : self.partitions[index].end]
                body += entry if fetch_offsets is None else self._at_offset(entry, fetch_offsets[index])
                yield
            body += view[topic.tail_position : topic.end]
        out = bytearray(view[: self.topics_position])
        out += write_array_length(topic_count, compact)
        out += body
        if self.version >= _SESSION_FROM:
            out += write_array_length(0, compact)
        out += view[self.forgotten_end :]
        return out

    def _at_offset(self, entry: memoryview, fetch_offset: int) -> bytearray:
        patched = bytearray(entry)
        INT64.pack_into(patched, _FETCH_OFFSET_AT_V9 if self.version >= 9 else _FETCH_OFFSET_AT_V4, fetch_offset)
        if self.version >= FLEXIBLE_FROM:
            INT32.pack_into(patched, _LAST_FETCHED_EPOCH_AT, NO_LEADER_EPOCH)
        return patched


def is_replica(replica_id: int) -> bool:
    """Whether the id is that of a broker or of a future replica, and not that of a consumer."""
    return replica_id >= 0 or replica_id == _FUTURE_REPLICA_ID


@Stepped
def parse_fetch_request(payload: Buffer, body_position: int, version: int) -> Steps[FetchRequest]:
    """Parses the payload, and ignores what follows its end, as a broker does (docs/semantics.md 1.1).

    Raises `ProtocolError` if it is malformed for that version."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    pos = body_position
    replica_id = CONSUMER_REPLICA_ID
    session_id = NO_SESSION_ID
    session_epoch = FINAL_SESSION_EPOCH
    if version < _REPLICA_STATE_FROM:
        replica_id, pos = read_int32(payload, pos)
    limits = _LIMITS_V7 if version >= _SESSION_FROM else _LIMITS_V4
    if pos + limits.size > len(payload):
        raise TruncatedError(f"a Fetch request of {len(payload)} bytes is shorter than its fixed fields")
    if version >= _SESSION_FROM:
        max_wait_ms, min_bytes, max_bytes, isolation_level, session_id, session_epoch = _LIMITS_V7.unpack_from(
            payload, pos
        )
    else:
        max_wait_ms, min_bytes, max_bytes, isolation_level = _LIMITS_V4.unpack_from(payload, pos)
    pos += limits.size

    topics_position = pos
    topics: list[FetchTopic] = []
    partitions: list[FetchPartition] = []
    topic_count, pos = read_array_length(payload, pos, compact)
    for _ in range(topic_count):
        start = pos
        topic, pos = read_topic_reference(payload, pos, version)
        partitions_position = pos
        first_partition = len(partitions)
        partition_count, _ = read_array_length(payload, pos, compact)
        check_items(topic_count + first_partition + partition_count)
        pos = yield from _read_partitions(payload, pos, version, topic, partitions)
        tail_position = pos
        if compact:
            pos = yield from skip_tags(payload, pos)
        topics.append(
            FetchTopic(topic, start, partitions_position, tail_position, pos, first_partition, len(partitions))
        )
        yield

    forgotten_position = pos
    forgotten: list[tuple[TopicReference, tuple[int, ...]]] = []
    if version >= _SESSION_FROM:
        pos = yield from _read_forgotten(payload, pos, version, forgotten)
    forgotten_end = pos
    if version >= _RACK_FROM:
        start, end = read_string_bounds(payload, pos, compact)
        pos = start if end < 0 else end
    if compact:
        tagged_replica_id, pos = yield from _read_tags(payload, pos)
        if version >= _REPLICA_STATE_FROM:
            replica_id = tagged_replica_id
    return FetchRequest(
        payload,
        version,
        body_position,
        replica_id,
        max_wait_ms,
        min_bytes,
        max_bytes,
        isolation_level,
        session_id,
        session_epoch,
        topics,
        partitions,
        forgotten,
        topics_position,
        forgotten_position,
        forgotten_end,
    )


def topics_of(payload: Buffer, body_position: int, version: int) -> list[TopicReference]:
    """Returns the topics that the request names, without the forgotten ones.

    The caller decides by them whether it must parse the request at all.
    """
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    pos = topics_position(body_position, version)
    topics: list[TopicReference] = []
    topic_count, pos = read_array_length(payload, pos, compact)
    for _ in range(topic_count):
        topic, pos = read_topic_reference(payload, pos, version)
        topics.append(topic)
        partition_count, pos = read_array_length(payload, pos, compact)
        if not compact:
            pos += max(partition_count, 0) * _entry_struct(version).size
            continue
        end = _end_of_untagged_entries(payload, pos, partition_count)
        if end is None:
            for _ in range(partition_count):
                pos = skip_tagged_section(payload, pos + _ENTRY_V12.size)
        else:
            pos = end
        pos = skip_tagged_section(payload, pos)
    if pos > len(payload):
        raise TruncatedError(f"the topics of a Fetch request exceed its {len(payload)} bytes")
    return topics


def topics_position(body_position: int, version: int) -> int:
    """Returns the position of the topics array. All fields before it have a fixed size."""
    replica_id_size = 0 if version >= _REPLICA_STATE_FROM else INT32.size
    limits = _LIMITS_V7 if version >= _SESSION_FROM else _LIMITS_V4
    return body_position + replica_id_size + limits.size


def patch_fetch_request(
    payload: bytearray,
    body_position: int,
    version: int,
    *,
    max_wait_ms: int | None = None,
    min_bytes: int | None = None,
    max_bytes: int | None = None,
    session_id: int | None = None,
    session_epoch: int | None = None,
) -> None:
    """Overwrites fields in place; None keeps a field. Ignores the session fields before version 7, which has none."""
    start = body_position + (0 if version >= _REPLICA_STATE_FROM else INT32.size)
    fields = [(0, max_wait_ms), (4, min_bytes), (8, max_bytes)]
    if version >= _SESSION_FROM:
        fields += [(13, session_id), (17, session_epoch)]
    for offset, value in fields:
        if value is not None:
            INT32.pack_into(payload, start + offset, value)


def _check_version(version: int) -> None:
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise ProtocolError(f"the proxy does not decode Fetch version {version}")


def _entry_struct(version: int) -> Struct:
    if version >= 12:
        return _ENTRY_V12
    if version >= 9:
        return _ENTRY_V9
    return _ENTRY_V5 if version >= 5 else _ENTRY_V4


def _end_of_untagged_entries(payload: Buffer, pos: int, count: int) -> int | None:
    """Returns the end of `count` flexible entries if no entry has tagged fields, as consumers send them; else None."""
    size = _ENTRY_V12_WITHOUT_TAGS.size
    end = pos + max(count, 0) * size
    if end > len(payload):
        return None
    return None if any(payload[pos + size - 1 : end : size]) else end


def _read_partitions(
    payload: Buffer, pos: int, version: int, topic: TopicReference, partitions: list[FetchPartition]
) -> Steps[int]:
    compact = version >= FLEXIBLE_FROM
    count, pos = read_array_length(payload, pos, compact)
    if count <= 0:
        return pos
    entry = _entry_struct(version)
    size = entry.size
    if pos + count * size > len(payload):
        raise TruncatedError(f"{count} partitions at {pos} exceed the message of {len(payload)} bytes")
    append = partitions.append
    if compact:
        end_of_all = _end_of_untagged_entries(payload, pos, count)
        if end_of_all is not None:
            size += 1
            for partition, leader_epoch, offset, fetched_epoch, _, max_bytes in _ENTRY_V12_WITHOUT_TAGS.iter_unpack(
                memoryview(payload)[pos:end_of_all]
            ):
                append(
                    FetchPartition(topic, partition, leader_epoch, offset, fetched_epoch, max_bytes, pos, pos + size)
                )
                pos += size
                yield
            return end_of_all
        for _ in range(count):
            start = pos
            if pos + size > len(payload):
                raise TruncatedError(f"a partition at {pos} exceeds the message of {len(payload)} bytes")
            partition, leader_epoch, offset, fetched_epoch, _, max_bytes = entry.unpack_from(payload, pos)
            pos = yield from skip_tags(payload, pos + size)
            append(FetchPartition(topic, partition, leader_epoch, offset, fetched_epoch, max_bytes, start, pos))
            yield
        return pos
    for values in entry.iter_unpack(memoryview(payload)[pos : pos + count * size]):
        leader_epoch = -1
        if version >= 9:
            partition, leader_epoch, offset, _, max_bytes = values
        elif version >= 5:
            partition, offset, _, max_bytes = values
        else:
            partition, offset, max_bytes = values
        append(FetchPartition(topic, partition, leader_epoch, offset, -1, max_bytes, pos, pos + size))
        pos += size
        yield
    return pos


def _read_forgotten(
    payload: Buffer, pos: int, version: int, forgotten: list[tuple[TopicReference, tuple[int, ...]]]
) -> Steps[int]:
    compact = version >= FLEXIBLE_FROM
    count, pos = read_array_length(payload, pos, compact)
    check_items(count)
    for _ in range(count):
        topic, pos = read_topic_reference(payload, pos, version)
        partition_count, pos = read_array_length(payload, pos, compact)
        end = pos + max(partition_count, 0) * INT32.size
        if end > len(payload):
            raise TruncatedError(
                f"{partition_count} forgotten partitions at {pos} exceed the message of {len(payload)} bytes"
            )
        forgotten.append((topic, tuple(p for (p,) in INT32.iter_unpack(memoryview(payload)[pos:end]))))
        pos = (yield from skip_tags(payload, end)) if compact else end
        yield
    return pos


def _read_tags(payload: Buffer, pos: int) -> Steps[tuple[int, int]]:
    """Reads the request's own tagged section. Returns `(replica id, position after the section)`."""
    replica_id = CONSUMER_REPLICA_ID
    count, pos = read_tag_count(payload, pos)
    for _ in range(count):
        tag, _, start, pos = read_tag(payload, pos)
        if tag == _REPLICA_STATE_TAG:
            replica_id, _ = read_int32(payload, start)
        yield
    return replica_id, pos
