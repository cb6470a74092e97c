"""OffsetForLeaderEpoch, versions 2 to 4: parses the messages and patches answers in place (docs/semantics.md 6.1).

The API asks for the end offset of a leader epoch. In a response the error code comes before the partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

from protocol.apis.partition_walk import check_end, read_end, walk_partitions, walk_request
from protocol.errors import ProtocolError
from protocol.primitives import Buffer, read_int32
from protocol.steps import Stepped, Steps

UNDEFINED_EPOCH = -1
UNDEFINED_EPOCH_OFFSET = -1

FLEXIBLE_FROM = 4
MIN_VERSION = 2
MAX_VERSION = 4

DEBUGGING_CONSUMER_REPLICA_ID = -2
"""Kafka's default for the replica id. It also stands for version 2, which has no replica id."""

_REPLICA_ID_FROM = 3
_ASKED = Struct(">iii")
_ANSWERED = Struct(">hiiq")
_EPOCH_AT = 6
_EPOCH_AND_END_OFFSET = Struct(">iq")
_ERROR_CODE = Struct(">h")


class EpochPartition(NamedTuple):
    topic: str
    partition: int
    current_leader_epoch: int
    leader_epoch: int
    """The epoch whose end offset the client asks for."""


class OffsetForLeaderEpochRequest(NamedTuple):
    version: int
    replica_id: int
    partitions: list[EpochPartition]


class EpochEndOffsetPartition(NamedTuple):
    topic: str
    error_code: int
    partition: int
    leader_epoch: int
    end_offset: int
    position: int
    """The position of the entry in the payload."""


class OffsetForLeaderEpochResponse(NamedTuple):
    """A parsed response. Positions are absolute in `payload`. The response references `payload`, without a copy."""

    payload: Buffer
    version: int
    throttle_time_ms: int
    partitions: list[EpochEndOffsetPartition]


class EpochAnswer(NamedTuple):
    error_code: int = 0
    leader_epoch: int = UNDEFINED_EPOCH
    end_offset: int = UNDEFINED_EPOCH_OFFSET


@Stepped
def parse_offset_for_leader_epoch_request(
    payload: Buffer, body_position: int, version: int
) -> Steps[OffsetForLeaderEpochRequest]:
    """Parses the payload. Raises `ProtocolError` if it is malformed for that version."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    replica_id, pos = DEBUGGING_CONSUMER_REPLICA_ID, body_position
    if version >= _REPLICA_ID_FROM:
        replica_id, pos = read_int32(payload, pos)
    walked, pos = yield from walk_request(payload, pos, _ASKED, compact)
    read_end(payload, pos, compact)
    partitions = []
    for topic, _, fields in walked:
        partitions.append(EpochPartition(topic, *fields))
        yield
    return OffsetForLeaderEpochRequest(version, replica_id, partitions)


@Stepped
def parse_offset_for_leader_epoch_response(
    payload: Buffer, body_position: int, version: int
) -> Steps[OffsetForLeaderEpochResponse]:
    """Parses the payload. Raises `ProtocolError` if it is malformed for that version or has trailing bytes."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    throttle_time_ms, pos = read_int32(payload, body_position)
    walked, pos = yield from walk_partitions(payload, pos, _ANSWERED, compact)
    check_end(payload, pos, compact)
    partitions = []
    for topic, position, (error_code, partition, leader_epoch, end_offset) in walked:
        partitions.append(EpochEndOffsetPartition(topic, error_code, partition, leader_epoch, end_offset, position))
        yield
    return OffsetForLeaderEpochResponse(payload, version, throttle_time_ms, partitions)


@Stepped
def patch_offset_for_leader_epoch_response(
    response: OffsetForLeaderEpochResponse, answers: Mapping[int, EpochAnswer]
) -> Steps[bytearray]:
    """Returns a copy of the payload in which `answers`, by index in `response.partitions`, replace the broker's."""
    out = bytearray(response.payload)
    for index, answer in answers.items():
        position = response.partitions[index].position
        _ERROR_CODE.pack_into(out, position, answer.error_code)
        _EPOCH_AND_END_OFFSET.pack_into(out, position + _EPOCH_AT, answer.leader_epoch, answer.end_offset)
        yield
    return out


def _check_version(version: int) -> None:
    if not MIN_VERSION <= version <= MAX_VERSION:
        raise ProtocolError(f"the proxy does not decode OffsetForLeaderEpoch version {version}")
