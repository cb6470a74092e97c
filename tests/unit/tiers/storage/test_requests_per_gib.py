"""The requests that an owner sends to a real S3 for each GiB, with the default sizes of the product.

S3 bills a PUT, POST, COPY or LIST, but no DELETE, and a GET with a twelfth."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Final

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.tier_process import Clock, OneTopic, TierProcess
from tests.support.servers.versitygw import VersityGateway
from tests.support.tiers.workbench import PARTITION, POLICY
from tiers.config.topic_policy import TopicConfig
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead
from tiers.storage.s3.storage import S3RemoteStorageManager

GIB: Final = 1 << 30
SEGMENT_BYTES: Final = TopicConfig.model_validate({"name": "orders"}).segment_bytes
BATCH: Final = batch_of(0, 1, value_bytes=(1 << 20) - 72, timestamp=-1)
"""1 MiB. Without a timestamp, a record ages from its copy."""
NOT_BILLED: Final = ("Get", "Head", "Delete", "Abort", "CreateBucket")
SEGMENTS, ROUNDS, ROUND_MS = 4, 8, 30_000
TIMES: Final = replace(POLICY, segment_ms=3_600_000, local_retention_ms=60_000, retention_ms=12 * ROUND_MS)
"""A segment is trimmed when the next one is copied, and expires some rounds later."""


class LongLog(InMemoryLog):
    """A log of equal batches, which are made when they are read."""

    batches = 0

    @property
    def end_offset(self) -> int:
        return self.batches

    async def size_bytes(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        return (self.batches - self.log_start_offset) * len(BATCH)

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        records = struct.pack(">q", offset) + BATCH[8:] if offset < self.batches else b""
        return LogRead(records, self.log_start_offset, self.batches, self.batches, 0, ())


@pytest.mark.full
@pytest.mark.parametrize(("share", "limit"), [(1.0, 28), (0.5, 45)])
async def test_requests_per_gib(s3: VersityGateway, tmp_path: Path, share: float, limit: int) -> None:
    """An owner takes over, and then copies, trims and expires. The segments have this share of `segment.bytes`."""
    bucket = f"cost-of-{100 * share:.0f}"
    await s3.create_bucket(bucket)
    settings = s3.settings(bucket) | {"cluster.id": "cluster"}
    clock, log = Clock(), LongLog()
    size_bytes = int(share * SEGMENT_BYTES)
    topics = OneTopic(replace(TIMES, segment_bytes=size_bytes))
    topic = FakeMetadataTopic(lambda: clock.wall_ms, owner="a")
    process = TierProcess("a", tmp_path, log, topic, topics, clock, lambda _: S3RemoteStorageManager(settings))
    await process.open()
    try:
        for _ in range(SEGMENTS):
            log.batches += size_bytes // len(BATCH)
            for _ in range(ROUNDS):
                await process.manager.round()
                clock.advance(ROUND_MS)
        last = process.metadata.state.remote_log_segment_metadata(PARTITION, log.batches - 1)
    finally:
        await process.end()
    assert last is not None
    assert last.segment_size_bytes == size_bytes
    asked = s3.operations(bucket)
    assert asked["DeleteObject"] >= 2 * (SEGMENTS - 2)
    assert asked["ListObjectsV2"] == 1
    billed = sum(count for name, count in asked.items() if not name.startswith(NOT_BILLED))
    assert billed / (SEGMENTS * size_bytes / GIB) <= limit
