"""DeleteRecords, versions 0 to 2: up to where a user deletes, low watermarks overwritten in place (semantics 9.1)."""

from __future__ import annotations

from collections.abc import Mapping
from struct import Struct
from typing import NamedTuple

from protocol.apis.partition_walk import check_end, walk_partitions
from protocol.errors import ProtocolError
from protocol.primitives import Buffer, read_int32

HIGH_WATERMARK = -1
"""As an offset to delete up to: everything that consumers may see."""
UNKNOWN_LOW_WATERMARK = -1

FLEXIBLE_FROM = 2
MAX_VERSION = 2

_ASKED = Struct(">iq")
_ANSWERED = Struct(">iqh")
_ANSWER_AT = 4
_ANSWER = Struct(">qh")


class DeleteRecordsPartition(NamedTuple):
    topic: str
    partition: int
    offset: int
    """The new log start; `HIGH_WATERMARK` (-1) for all."""


class DeleteRecordsRequest(NamedTuple):
    version: int
    partitions: list[DeleteRecordsPartition]
    timeout_ms: int


class DeleteRecordsResponsePartition(NamedTuple):
    topic: str
    partition: int
    low_watermark: int
    error_code: int
    position: int
    """Of the entry in the payload."""


class DeleteRecordsResponse(NamedTuple):
    """Positions are absolute in `payload`, which is referenced, not copied."""

    payload: Buffer
    version: int
    throttle_time_ms: int
    partitions: list[DeleteRecordsResponsePartition]


class DeleteRecordsAnswer(NamedTuple):
    low_watermark: int = UNKNOWN_LOW_WATERMARK
    error_code: int = 0


def parse_delete_records_request(payload: Buffer, body_position: int, version: int) -> DeleteRecordsRequest:
    """Raises `ProtocolError` for what is no request of that version, trailing bytes included."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    walked, pos = walk_partitions(payload, body_position, _ASKED, compact)
    timeout_ms, pos = read_int32(payload, pos)
    check_end(payload, pos, compact)
    return DeleteRecordsRequest(
        version, [DeleteRecordsPartition(topic, *fields) for topic, _, fields in walked], timeout_ms
    )


def parse_delete_records_response(payload: Buffer, body_position: int, version: int) -> DeleteRecordsResponse:
    """Raises `ProtocolError` for what is no response of that version, trailing bytes included."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    throttle_time_ms, pos = read_int32(payload, body_position)
    walked, pos = walk_partitions(payload, pos, _ANSWERED, compact)
    check_end(payload, pos, compact)
    partitions = [
        DeleteRecordsResponsePartition(topic, partition, low_watermark, error_code, position)
        for topic, position, (partition, low_watermark, error_code) in walked
    ]
    return DeleteRecordsResponse(payload, version, throttle_time_ms, partitions)


def patch_delete_records_response(
    response: DeleteRecordsResponse, answers: Mapping[int, DeleteRecordsAnswer]
) -> bytearray:
    """A copy of the payload with the answers of the partitions at those indexes overwritten."""
    out = bytearray(response.payload)
    for index, answer in answers.items():
        _ANSWER.pack_into(out, response.partitions[index].position + _ANSWER_AT, *answer)
    return out


def _check_version(version: int) -> None:
    if not 0 <= version <= MAX_VERSION:
        raise ProtocolError(f"DeleteRecords version {version}")
