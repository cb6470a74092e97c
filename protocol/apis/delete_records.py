"""DeleteRecords, versions 0 to 2: parses the messages and patches low watermarks in place (docs/semantics.md 9.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct
from typing import NamedTuple

from protocol.apis.partition_walk import check_end, read_end, walk_partitions, walk_request
from protocol.errors import ProtocolError
from protocol.primitives import Buffer, read_int32
from protocol.steps import Stepped, Steps

HIGH_WATERMARK = -1
"""The requested offset that means the high watermark: the broker deletes all records that consumers may see."""
UNKNOWN_LOW_WATERMARK = -1

FLEXIBLE_FROM = 2
MAX_VERSION = 2

_REFUSED_OFFSET = -2
_ASKED = Struct(">iq")
_OFFSET = Struct(">q")
_OFFSET_AT = 4
_ANSWERED = Struct(">iqh")
_ANSWER_AT = 4
_ANSWER = Struct(">qh")


class DeleteRecordsPartition(NamedTuple):
    topic: str
    partition: int
    offset: int
    """The new log start; `HIGH_WATERMARK` (-1) for all records."""
    position: int = -1
    """The position of the entry in the payload."""


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
    """The position of the entry in the payload."""


class DeleteRecordsResponse(NamedTuple):
    """A parsed response. Positions are absolute in `payload`. The response references `payload`, without a copy."""

    payload: Buffer
    version: int
    throttle_time_ms: int
    partitions: list[DeleteRecordsResponsePartition]


class DeleteRecordsAnswer(NamedTuple):
    low_watermark: int = UNKNOWN_LOW_WATERMARK
    error_code: int = 0


@Stepped
def parse_delete_records_request(payload: Buffer, body_position: int, version: int) -> Steps[DeleteRecordsRequest]:
    """Parses the payload. Raises `ProtocolError` if it is malformed for that version."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    walked, pos = yield from walk_request(payload, body_position, _ASKED, compact)
    timeout_ms, pos = read_int32(payload, pos)
    read_end(payload, pos, compact)
    partitions = []
    for topic, position, (partition, offset) in walked:
        partitions.append(DeleteRecordsPartition(topic, partition, offset, position))
        yield
    return DeleteRecordsRequest(version, partitions, timeout_ms)


@Stepped
def with_refused_partitions(payload: Buffer, refused: Iterable[DeleteRecordsPartition]) -> Steps[bytes]:
    """Returns a copy of the request that deletes nothing of the partitions in `refused`.

    It asks for an offset that no broker accepts. The broker still checks the client's rights and whether it leads the
    partition, and only then answers OFFSET_OUT_OF_RANGE."""
    out = bytearray(payload)
    for one in refused:
        _OFFSET.pack_into(out, one.position + _OFFSET_AT, _REFUSED_OFFSET)
        yield
    return bytes(out)


@Stepped
def parse_delete_records_response(payload: Buffer, body_position: int, version: int) -> Steps[DeleteRecordsResponse]:
    """Parses the payload. Raises `ProtocolError` if it is malformed for that version or has trailing bytes."""
    _check_version(version)
    compact = version >= FLEXIBLE_FROM
    throttle_time_ms, pos = read_int32(payload, body_position)
    walked, pos = yield from walk_partitions(payload, pos, _ANSWERED, compact)
    check_end(payload, pos, compact)
    partitions = []
    for topic, position, (partition, low_watermark, error_code) in walked:
        partitions.append(DeleteRecordsResponsePartition(topic, partition, low_watermark, error_code, position))
        yield
    return DeleteRecordsResponse(payload, version, throttle_time_ms, partitions)


@Stepped
def patch_delete_records_response(
    response: DeleteRecordsResponse, answers: Mapping[int, DeleteRecordsAnswer]
) -> Steps[bytearray]:
    """Returns a copy of the payload in which `answers`, by index in `response.partitions`, replace the broker's."""
    out = bytearray(response.payload)
    for index, answer in answers.items():
        _ANSWER.pack_into(out, response.partitions[index].position + _ANSWER_AT, *answer)
        yield
    return out


def _check_version(version: int) -> None:
    if not 0 <= version <= MAX_VERSION:
        raise ProtocolError(f"the proxy does not decode DeleteRecords version {version}")
