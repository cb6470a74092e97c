"""Batches of the metadata topic, and a broker's answer with them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from uuid import UUID

import google_crc32c
from kafka.record.default_records import DefaultRecordBatchBuilder

from protocol.errors import ErrorCode
from tests.support.tiers.metadata_state import NOW_MS
from tiers.broker.fetch import FetchedPartition
from tiers.model.log_source import AbortedTransaction

TRANSACTIONAL = 0x10
LOG_APPEND_TIME = 0x08
OWNER = 7


def batch(
    base_offset: int,
    records: Sequence[tuple[bytes | None, bytes | None]],
    producer_id: int = OWNER,
    attributes: int = TRANSACTIONAL,
) -> bytes:
    builder = DefaultRecordBatchBuilder(
        magic=2,
        compression_type=0,
        is_transactional=False,
        producer_id=producer_id,
        producer_epoch=0,
        base_sequence=0,
        batch_size=1 << 20,
    )
    for index, (key, value) in enumerate(records):
        builder.append(index, NOW_MS - 5, key, value, [])
    raw = bytearray(builder.build())
    struct.pack_into(">q", raw, 0, base_offset)
    struct.pack_into(">h", raw, 21, attributes | LOG_APPEND_TIME)
    struct.pack_into(">q", raw, 35, NOW_MS)
    return with_crc(raw)


def with_crc(raw: bytearray) -> bytes:
    struct.pack_into(">I", raw, 17, google_crc32c.value(bytes(raw[21:])))
    return bytes(raw)


def fetched(
    records: bytes, aborted: tuple[AbortedTransaction, ...] = (), error: int = ErrorCode.NONE
) -> FetchedPartition:
    return FetchedPartition(UUID(int=1), 0, error, 100, 100, 0, aborted, memoryview(records))
