"""Reads DescribeLogDirs, and adds a log directory to a response (docs/semantics.md 9.6)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.header import parse_request_header, response_body_position
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT16,
    INT32,
    INT64,
    Buffer,
    read_array_length,
    read_int16,
    write_array_length,
    write_string,
)
from protocol.schema import compile_message
from protocol.splice import Splice, splice
from protocol.steps import Stepped, Steps

_ERROR_CODE_FROM = 3
_VOLUME_FROM = 4
_CORDONED_FROM = 5
_UNKNOWN_BYTES = -1

PartitionSizes = Mapping[str, Mapping[int, int]]
"""The size in bytes by topic and partition."""


class LogDirs(NamedTuple):
    """The directories of a response: the array `start` to `end`, whose elements begin at `first`."""

    length: int
    start: int
    first: int
    end: int


def asks_for_all(frame: Buffer) -> bool:
    """Whether a request asks for all partitions of the broker, which means that it names none.

    Raises `ProtocolError`."""
    header = parse_request_header(frame)
    compact = compile_message(header.api_key, header.api_version, "Request").is_flexible
    return read_array_length(frame, header.body_position, compact)[0] < 0


@Stepped
def granted_log_dirs(payload: Buffer, version: int) -> Steps[LogDirs | None]:
    """Returns the directories of a response. None: the broker refuses the request, or reports no usable directory.

    Up to version 2 a refusal is a response without directories. Raises `ProtocolError`."""
    plan = compile_message(ApiKey.DESCRIBE_LOG_DIRS, version, "Response")
    pos = response_body_position(ApiKey.DESCRIBE_LOG_DIRS, version, payload)
    yield from plan.skip.steps(payload, pos)
    names = ("ErrorCode", "Results") if version >= _ERROR_CODE_FROM else ("Results",)
    ((*code_at, results_at),) = (yield from plan.selector((), names).steps(payload, pos)).structs
    if code_at and read_int16(payload, code_at[0].start)[0] != ErrorCode.NONE:
        return None
    codes = (yield from plan.selector(("Results",), ("ErrorCode",)).steps(payload, pos)).structs
    if not any(read_int16(payload, code.start)[0] == ErrorCode.NONE for (code,) in codes):
        return None
    length, first = read_array_length(payload, results_at.start, plan.is_flexible)
    return LogDirs(length, results_at.start, first, results_at.end)


@Stepped
def with_log_dir(payload: Buffer, version: int, dirs: LogDirs, path: str, sizes: PartitionSizes) -> Steps[bytes]:
    """Returns the response with one more directory at its end. The size of its volume is unknown."""
    compact = compile_message(ApiKey.DESCRIBE_LOG_DIRS, version, "Response").is_flexible
    longer = Splice(dirs.start, dirs.first, write_array_length(dirs.length + 1, compact))
    added = yield from _encoded(version, compact, path, sizes)
    return (yield from splice.steps(payload, [longer, Splice(dirs.end, dirs.end, added)]))


def _encoded(version: int, compact: bool, path: str, sizes: PartitionSizes) -> Steps[bytes]:
    tags = EMPTY_TAGGED_SECTION if compact else b""
    parts = [INT16.pack(ErrorCode.NONE), write_string(path, compact), write_array_length(len(sizes), compact)]
    for topic, partitions in sizes.items():
        parts += [write_string(topic, compact), write_array_length(len(partitions), compact)]
        for index, size_bytes in partitions.items():
            # The copies have no lag behind a replica, and are no future replica.
            parts.append(INT32.pack(index) + INT64.pack(size_bytes) + INT64.pack(0) + b"\x00" + tags)
            yield
        parts.append(tags)
    if version >= _VOLUME_FROM:
        parts.append(INT64.pack(_UNKNOWN_BYTES) * 2)
    if version >= _CORDONED_FROM:
        parts.append(b"\x00")
    return b"".join((*parts, tags))
