"""Encodes the Fetch responses that the proxy itself builds, and their entries for remote data (docs/semantics.md 2.2).

Records are never null, because librdkafka fails the whole response on null records.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct

from protocol.api_keys import ApiKey
from protocol.apis.fetch.request import FLEXIBLE_FROM
from protocol.apis.fetch.response import (
    DIVERGING_EPOCH_TAG,
    LOG_START_OFFSET_FROM,
    NO_PREFERRED_READ_REPLICA,
    PREFERRED_READ_REPLICA_FROM,
    SESSION_FROM,
    UNKNOWN_OFFSET,
    AbortedTransaction,
    EpochEndOffset,
)
from protocol.apis.topic_reference import TopicReference, write_topic_reference
from protocol.header import build_response_header
from protocol.primitives import (
    EMPTY_TAGGED_SECTION,
    INT32,
    INT64,
    Buffer,
    write_array_length,
    write_bytes_length,
    write_uvarint,
)

_HEAD = Struct(">ihqq")
_TOP = Struct(">ihi")
_PRODUCER_ID_AND_FIRST_OFFSET = Struct(">qq")
_EPOCH_AND_END_OFFSET = Struct(">iq")
_NULL_ARRAY = {False: INT32.pack(-1), True: b"\x00"}


def encode_partition(
    version: int,
    partition: int,
    *,
    error_code: int = 0,
    high_watermark: int = UNKNOWN_OFFSET,
    last_stable_offset: int = UNKNOWN_OFFSET,
    log_start_offset: int = UNKNOWN_OFFSET,
    aborted_transactions: Sequence[AbortedTransaction] | None = None,
    records: Sequence[Buffer] = (),
    diverging_epoch: EpochEndOffset | None = None,
) -> list[Buffer]:
    """Returns the buffers of one partition entry. They include the buffers in `records`, which are not copied.

    Under read_uncommitted, `aborted_transactions` is None. Otherwise the caller must sort it by first offset and remove
    duplicates (docs/semantics.md 7). Raises `ValueError` for a diverging epoch before version 12.
    """
    compact = version >= FLEXIBLE_FROM
    head = bytearray(_HEAD.pack(partition, error_code, high_watermark, last_stable_offset))
    if version >= LOG_START_OFFSET_FROM:
        head += INT64.pack(log_start_offset)
    if aborted_transactions is None:
        head += _NULL_ARRAY[compact]
    else:
        head += write_array_length(len(aborted_transactions), compact)
        for producer_id, first_offset in aborted_transactions:
            head += _PRODUCER_ID_AND_FIRST_OFFSET.pack(producer_id, first_offset)
            if compact:
                head += EMPTY_TAGGED_SECTION
    if version >= PREFERRED_READ_REPLICA_FROM:
        head += INT32.pack(NO_PREFERRED_READ_REPLICA)
    head += write_bytes_length(sum(len(buffer) for buffer in records), compact)
    if not compact:
        if diverging_epoch is not None:
            raise ValueError(f"Fetch version {version} has no diverging epoch")
        return [head, *records]
    tail = EMPTY_TAGGED_SECTION
    if diverging_epoch is not None:
        content = _EPOCH_AND_END_OFFSET.pack(*diverging_epoch) + EMPTY_TAGGED_SECTION
        tail = b"\x01" + write_uvarint(DIVERGING_EPOCH_TAG) + write_uvarint(len(content)) + content
    return [head, *records, tail]


def encode_response(
    version: int,
    correlation_id: int,
    topics: Sequence[tuple[TopicReference, Sequence[Sequence[Buffer]]]],
    *,
    throttle_time_ms: int = 0,
    error_code: int = 0,
    session_id: int = 0,
) -> list[Buffer]:
    """Returns the buffers of a response payload, header included.

    `topics` holds `(topic, [entry])`, where `encode_partition` made each entry. Versions before 7 have no fields for
    `error_code` and `session_id`.
    """
    compact = version >= FLEXIBLE_FROM
    head = bytearray(build_response_header(ApiKey.FETCH, version, correlation_id))
    if version >= SESSION_FROM:
        head += _TOP.pack(throttle_time_ms, error_code, session_id)
    else:
        head += INT32.pack(throttle_time_ms)
    head += write_array_length(len(topics), compact)
    out: list[Buffer] = [head]
    for topic, entries in topics:
        out.append(write_topic_reference(topic, version) + write_array_length(len(entries), compact))
        for entry in entries:
            out.extend(entry)
        if compact:
            out.append(EMPTY_TAGGED_SECTION)
    if compact:
        out.append(EMPTY_TAGGED_SECTION)
    return out
