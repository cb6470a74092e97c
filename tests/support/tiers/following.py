"""A `MetadataFollower` over scripted answers of one cluster."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kafka.protocol.admin import DescribeConfigsRequest
from kafka.protocol.consumer import OffsetForLeaderEpochRequest
from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tests.support.tiers.metadata_batches import batch
from tests.support.tiers.metadata_state import IDENTITY, NOW_MS, Record, open_state, segment, to
from tiers.broker.client import Leader
from tiers.broker.cluster_metadata import Broker, ClusterMetadata
from tiers.broker.fetch import FetchedPartition
from tiers.metadata.records.serde import KeyAndValue, encode_key, encode_value, key_of
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.follower import MetadataFollower
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import EpochEndOffset
from tiers.model.segment_metadata import RemoteLogSegmentState as State

TOPIC = MetadataTopic("cluster", "__remote_log_metadata", IDENTITY.topic_id, 2)
NODE = 1
FINISHED = State.COPY_SEGMENT_FINISHED


class Cluster:
    """One broker leads both metadata partitions. `logs` holds their records, or their keys and values; as a
    `BrokerClient` and a Fetch."""

    def __init__(self) -> None:
        self.logs: dict[int, list[Record | KeyAndValue]] = {0: [], 1: []}
        self.epoch_starts: dict[int, dict[int, int]] = {0: {0: 0}, 1: {0: 0}}
        """Per leader epoch of a log, its first offset."""
        self.log_start = 0
        self.leaders = {NODE: Leader(NODE, 0)}
        """Who leads, by the broker that says so."""
        self.isr = [NODE]
        self.error_of_latest = ErrorCode.NONE
        self.high_watermark: int | None = None
        """Of every answer to a Fetch; None: the log's end."""
        self.epochs_fetched: list[int] = []
        self.hanging: dict[int, asyncio.Event] = {}
        self.delete_retention_ms = 86_400_000

    async def brokers(self, max_age_ms: int, timeout_ms: int) -> ClusterMetadata:
        return self.cached_metadata

    @property
    def cached_metadata(self) -> ClusterMetadata:
        brokers = {node_id: Broker(node_id, "broker", 9092) for node_id in self.leaders}
        return ClusterMetadata("cluster", NODE, brokers, {}, 0)

    async def request(self, node_id: int, message: Any, timeout_ms: int, *, min_version: int = 0) -> Any:
        if node_id in self.hanging:
            await self.hanging[node_id].wait()
        if isinstance(message, MetadataRequest):
            return self._named(node_id)
        if isinstance(message, DescribeConfigsRequest):
            config = SimpleNamespace(name="delete.retention.ms", value=str(self.delete_retention_ms))
            return SimpleNamespace(results=[SimpleNamespace(error_code=0, configs=[config])])
        if isinstance(message, OffsetForLeaderEpochRequest):
            return self._epoch_ends(message)
        return self._listed(message)

    def _named(self, witness: int) -> Any:
        leader = self.leaders[witness]
        partitions = [
            SimpleNamespace(
                partition_index=number,
                leader_id=leader.node_id,
                leader_epoch=leader.leader_epoch,
                isr_nodes=self.isr,
            )
            for number in self.logs
        ]
        topic = SimpleNamespace(topic_id=TOPIC.topic_id, partitions=partitions)
        return SimpleNamespace(cluster_id="cluster", topics=[topic])

    def _listed(self, message: Any) -> Any:
        partitions = []
        for asked in message.topics[0].partitions:
            number = asked.partition_index
            error, offset = self.error_of_latest, len(self.logs[number])
            if asked.timestamp == -2:
                error, offset = ErrorCode.NONE, self.log_start
            partitions.append(SimpleNamespace(partition_index=number, error_code=error, offset=offset))
        return SimpleNamespace(topics=[SimpleNamespace(partitions=partitions)])

    def _epoch_ends(self, message: Any) -> Any:
        partitions = []
        for asked in message.topics[0].partitions:
            ends = asdict(self.epoch_end(asked.partition, asked.leader_epoch))
            partitions.append(SimpleNamespace(partition=asked.partition, error_code=0, **ends))
        return SimpleNamespace(topics=[SimpleNamespace(partitions=partitions)])

    def epoch_end(self, number: int, leader_epoch: int) -> EpochEndOffset:
        """As Kafka's LeaderEpochFileCache answers (docs/semantics.md 6.1)."""
        starts = self.epoch_starts[number]
        higher = [epoch for epoch in starts if epoch > leader_epoch]
        if starts and leader_epoch == max(starts):
            return EpochEndOffset(leader_epoch, len(self.logs[number]))
        if leader_epoch < 0 or not higher:
            return EpochEndOffset(-1, -1)
        floor = max((epoch for epoch in starts if epoch <= leader_epoch), default=leader_epoch)
        return EpochEndOffset(floor, starts[min(higher)])

    def cut(self, number: int, end: int) -> None:
        """The log loses its tail, and its leader comes back in the next leader epoch."""
        del self.logs[number][end:]
        self.lead(max(leader.leader_epoch for leader in self.leaders.values()) + 1)

    def lead(self, leader_epoch: int) -> None:
        self.leaders = {NODE: Leader(NODE, leader_epoch)}
        for number, log in self.logs.items():
            starts = {epoch: start for epoch, start in self.epoch_starts[number].items() if start < len(log)}
            self.epoch_starts[number] = starts | {leader_epoch: len(log)}

    async def fetch(self, client: object, node_id: int, positions: list[Any], **options: object) -> Any:
        await asyncio.sleep(0.001)
        self.epochs_fetched += [each.leader_epoch for each in positions]
        return [self._fetched(each.partition, each.offset, each.last_fetched_epoch) for each in positions]

    def _fetched(self, number: int, offset: int, last_fetched_epoch: int = -1) -> FetchedPartition:
        end = len(self.logs[number])
        is_held, diverging = self.log_start <= offset <= end, None
        if last_fetched_epoch >= 0 and offset >= self.log_start:
            answer = self.epoch_end(number, last_fetched_epoch)
            is_held = answer.leader_epoch >= 0
            if is_held and (answer.leader_epoch < last_fetched_epoch or answer.end_offset < offset):
                diverging = answer
        error = ErrorCode.NONE if is_held else ErrorCode.OFFSET_OUT_OF_RANGE
        raw = b"" if diverging or not is_held else b"".join(map(self._batch, [number] * end, range(offset, end)))
        end = end if self.high_watermark is None else self.high_watermark
        return FetchedPartition(TOPIC.topic_id, number, error, end, end, 0, (), memoryview(raw), diverging)

    def _batch(self, number: int, offset: int) -> bytes:
        record = self.logs[number][offset]
        pair = record if isinstance(record, tuple) else (encode_key(key_of(record)), encode_value(record))
        raw = bytearray(batch(offset, [pair]))
        starts = self.epoch_starts[number]
        struct.pack_into(">i", raw, 12, max(epoch for epoch, start in starts.items() if start <= offset))
        return bytes(raw)


class Following:
    def __init__(
        self,
        cluster: Cluster,
        state: RemoteLogMetadataStateWriter,
        home_of: Callable[[TopicIdPartition], int] | None = None,
    ) -> None:
        self.state = state
        self.now_ms = 1_000
        self.wall_ms = NOW_MS
        self.follower = MetadataFollower(
            cluster,  # type: ignore[arg-type]  # a client as far as the follower uses it
            TOPIC,
            state,
            clock_ms=self._tick,
            wall_clock_ms=lambda: self.wall_ms,
            home_of=home_of,
        )

    def _tick(self) -> int:
        self.now_ms += 1
        return self.now_ms

    async def poll(self) -> bool:
        await self.follower._leadership.confirm(1_000)
        followed = self.follower._followed
        return await self.follower._poll(NODE, [each for each in followed.partitions if followed.stopped(each) is None])


@contextmanager
def opened(
    cluster: Cluster,
    folder: Path,
    home_of: Callable[[TopicIdPartition], int] | None = None,
    *,
    is_kept: bool = True,
    later_ms: int = 0,
) -> Iterator[Following]:
    """A process that follows the topic with the state in a folder. It starts `later_ms` after `NOW_MS`."""
    with closing(open_state(folder, is_kept=is_kept)) as state:
        following = Following(cluster, state, home_of)
        following.wall_ms += later_ms
        try:
            yield following
        finally:
            following.follower.close()


def finished(number: int, start: int) -> list[Record | KeyAndValue]:
    made = segment(number, start, start + 9)
    return [made, to(made, FINISHED)]
