"""Requests for records of the remote tier, and what the answers hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.remote_tier import TOPIC_ID
from tiers.broker.client import monotonic_ms
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteRead, RemoteReadRequest

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")


def in_ms(timeout_ms: int = 20_000) -> int:
    """Returns a deadline on the clock of the reader."""
    return monotonic_ms() + timeout_ms


def asked(offset: int, max_bytes: int = 100_000, timeout_ms: int = 20_000, **more: Any) -> RemoteReadRequest:
    """Returns a request for one message or more of `P0`. `more` replaces other fields of it."""
    return replace(RemoteReadRequest(P0, offset, max_bytes, True, 0, in_ms(timeout_ms), 1), **more)


def joined(read: RemoteRead) -> bytes:
    return b"".join(read.records)


def next_offset(read: RemoteRead) -> int:
    """Returns the offset after the last batch of an answer."""
    return [batch for view in read.records for batch in iterate_batches(view)][-1].next_offset


async def read_all(reader: RemoteLogReader, end: int, max_bytes: int = 900) -> bytes:
    """Reads all records below an offset."""
    records, offset = b"", 0
    while offset < end:
        read = await reader.read(asked(offset, max_bytes))
        records += joined(read)
        offset = next_offset(read)
        assert offset <= read.next_offset
    return records
