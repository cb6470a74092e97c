"""ListOffsets, versions 1 to 11: parses the messages and patches answers in place (docs/semantics.md 5).

Topics have names in every version. Below version 4 an answer has no leader epoch. The proxy does not read version 0,
which has lists of offsets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import NamedTuple

from protocol.apis.partition_walk import check_end, read_end, walk_partitions, walk_request
from protocol.errors import ProtocolError
from protocol.primitives import INT64, Buffer, read_int8, read_int32
from protocol.steps import Stepped, Steps

LATEST_TIMESTAMP = -1
EARLIEST_TIMESTAMP = -2
NEXT_LOCAL_TIMESTAMP = -3
"""Below version 7 only: the offset from which the local log has to be read (docs/semantics.md 5.1)."""
MAX_TIMESTAMP = -3
"""From version 7 on (KIP-734)."""
EARLIEST_LOCAL_TIMESTAMP = -4
LATEST_TIERED_TIMESTAMP = -5
EARLIEST_PENDING_UPLOAD_TIMESTAMP = -6

UNKNOWN_TIMESTAMP = -1
UNKNOWN_OFFSET = -1
UNKNOWN_LEADER_EPOCH = -1

FLEXIBLE_FROM = 6
MIN_VERSION = 1
MAX_VERSION = 11

_ISOLATION_LEVEL_FROM = 2
_THROTTLE_FROM = 2
_LEADER_EPOCH_FROM = 4
_MAX_TIMESTAMP_FROM = 7
_TIMEOUT_FROM = 10

_ASKED_V1 = Struct(">iq")
_ASKED_V4 = Struct(">iiq")
_TIMESTAMP_AT_V1 = 4
_TIMESTAMP_AT_V4 = 8
_ANSWERED_V1 = Struct(">ihqq")
_ANSWERED_V4 = Struct(">ihqqi")
_ANSWER_AT = 4
_ANSWER_V1 = Struct(">hqq")
_ANSWER_V4 = Struct(">hqqi")


class ListOffsetsPartition(NamedTuple):
    topic: str
    partition: int
    current_leader_epoch: int
    """-1 before version 4."""
    timestamp: int
    """Milliseconds since the epoch, or one of the negative constants above."""
    position: int
    """The position of the timestamp in the payload."""


class ListOffsetsRequest(NamedTuple):
    version: int
    replica_id: int
    isolation_level: int
    partitions: list[ListOffsetsPartition]
    """In wire order, duplicates included; the broker refuses duplicates."""
    timeout_ms: int
    """0 when the version has no timeout or the client sent none."""

    @property
    def is_read_committed(self) -> bool:
        return self.isolation_level == 1

    def asks_next_local(self, timestamp: int) -> bool:
        """Whether this version's `timestamp` asks from which offset on the local log has to be read."""
        if self.version < _MAX_TIMESTAMP_FROM:
            return timestamp == NEXT_LOCAL_TIMESTAMP
        return timestamp == EARLIEST_PENDING_UPLOAD_TIMESTAMP

    @property
    def has_max_timestamp(self) -> bool:
        """Whether -3 is MAX_TIMESTAMP in this version. If not, -3 is NEXT_LOCAL_TIMESTAMP."""
        return self.version >= _MAX_TIMESTAMP_FROM


class ListOffsetsResponsePartition(NamedTuple):
    topic: str
    partition: int
    error_code: int
    timestamp: int
    offset: int
    leader_epoch: int
    position: int
    """The position of the entry in the payload."""


class ListOffsetsResponse(NamedTuple):
    """A parsed response. Positions are absolute in `payload`. The response references `payload`, without a copy."""

    payload: Buffer
    version: int
    throttle_time_ms: int
    partitions: list[ListOffsetsResponsePartition]


class ListOffsetsAnswer(NamedTuple):
    error_code: int = 0
    timestamp: int = UNKNOWN_TIMESTAMP
    offset: int = UNKNOWN_OFFSET
    leader_epoch: int = UNKNOWN_LEADER_EPOCH
    """The leader epoch in which the record at that offset was written, or -1; never the current one for old data.

    Versions before 4 have no field for it."""


@Stepped
def parse_list_offsets_request(payload: Buffer, body_position: int, version: int) -> Steps[ListOffsetsRequest]:
    """Parses the payload. Raises `ProtocolError` if it is malformed for that version."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    isolation_level = timeout_ms = 0
    replica_id, pos = read_int32(payload, body_position)
    if version >= _ISOLATION_LEVEL_FROM:
        isolation_level, pos = read_int8(payload, pos)
    if version >= _LEADER_EPOCH_FROM:
        layout, timestamp_at = _ASKED_V4, _TIMESTAMP_AT_V4
    else:
        layout, timestamp_at = _ASKED_V1, _TIMESTAMP_AT_V1
    walked, pos = yield from walk_request(payload, pos, layout, compact)
    partitions = []
    for topic, position, (partition, *epoch, timestamp) in walked:
        leader_epoch = epoch[0] if epoch else UNKNOWN_LEADER_EPOCH
        partitions.append(ListOffsetsPartition(topic, partition, leader_epoch, timestamp, position + timestamp_at))
        yield
    if version >= _TIMEOUT_FROM:
        timeout_ms, pos = read_int32(payload, pos)
    read_end(payload, pos, compact)
    return ListOffsetsRequest(version, replica_id, isolation_level, partitions, timeout_ms)


def with_timestamp(payload: Buffer, partitions: Iterable[ListOffsetsPartition], timestamp: int) -> Steps[bytearray]:
    """Returns a copy of the request's payload that asks for `timestamp` at each of the partitions."""
    out = bytearray(payload)
    for asked in partitions:
        INT64.pack_into(out, asked.position, timestamp)
        yield
    return out


@Stepped
def parse_list_offsets_response(payload: Buffer, body_position: int, version: int) -> Steps[ListOffsetsResponse]:
    """Parses the payload. Raises `ProtocolError` if it is malformed for that version or has trailing bytes."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    throttle_time_ms, pos = 0, body_position
    if version >= _THROTTLE_FROM:
        throttle_time_ms, pos = read_int32(payload, pos)
    has_epoch = version >= _LEADER_EPOCH_FROM
    walked, pos = yield from walk_partitions(payload, pos, _ANSWERED_V4 if has_epoch else _ANSWERED_V1, compact)
    partitions = []
    for topic, position, (partition, error_code, timestamp, offset, *epoch) in walked:
        leader_epoch = epoch[0] if epoch else UNKNOWN_LEADER_EPOCH
        partitions.append(
            ListOffsetsResponsePartition(topic, partition, error_code, timestamp, offset, leader_epoch, position)
        )
        yield
    check_end(payload, pos, compact)
    return ListOffsetsResponse(payload, version, throttle_time_ms, partitions)


@Stepped
def patch_list_offsets_response(
    response: ListOffsetsResponse, answers: Mapping[int, ListOffsetsAnswer]
) -> Steps[bytearray]:
    """Returns a copy of the payload in which `answers`, by index in `response.partitions`, replace the broker's."""
    out = bytearray(response.payload)
    for index, answer in answers.items():
        position = response.partitions[index].position + _ANSWER_AT
        if response.version >= _LEADER_EPOCH_FROM:
            _ANSWER_V4.pack_into(out, position, *answer)
        else:
            _ANSWER_V1.pack_into(out, position, *answer[:3])
        yield
    return out


def _check_version(version: int) -> None:
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise ProtocolError(f"the proxy does not decode ListOffsets version {version}")
