"""Topics of a cluster to offload, with a metadata topic and a store of their own, and checks of the result.

Tasks run in this process unless a test brings Spark: what a driver and its executors do is the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pipeline.config import PipelineConfig, parse_pipeline_config
from pipeline.offload.driver import OffloadOptions, OffloadReport
from pipeline.offload.job import run_offload
from pipeline.offload.task import OffloadResult, OffloadTask, copy_tiles
from protocol.records.record_batch import iterate_batches
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values, topic_id_partition
from tiers.access.open_tier import OpenTier, open_tier, readable_segments
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.verify.segment_verification import verify_segment

T = TypeVar("T")
TIMEOUT_MS = 300_000
CLAIM_TIMEOUT_MS = 180_000
"""A group and its transactions may wait for the dead, and for a busy machine."""
SEGMENT_BYTES = 60_000


@dataclass(frozen=True)
class Looked:
    """A partition's remote tier at one moment."""

    segments: list[RemoteLogSegmentMetadata]
    unfinished: list[RemoteLogSegmentMetadata]
    remote_bytes: bytes
    log_bytes: bytes
    """Of the broker, up to the last stable offset."""

    @property
    def ranges(self) -> list[tuple[int, int]]:
        return [(one.start_offset, one.end_offset) for one in self.segments]


@dataclass(frozen=True)
class OffloadRig:
    kafka: KafkaCluster
    folder: Path
    topic: str
    text: str
    stored: Path | None = None
    """Where the store has its files, if not in `folder`."""

    @property
    def config(self) -> PipelineConfig:
        return parse_pipeline_config(self.text)

    def offload(
        self,
        run: Callable[[Sequence[OffloadTask]], list[OffloadResult]] | None = None,
        options: OffloadOptions | None = None,
        parallelism: int = 2,
    ) -> OffloadReport:
        here = options or OffloadOptions(max_age_ms=0, failure_pause_s=0, claim_timeout_ms=CLAIM_TIMEOUT_MS)
        return run_offload(self.config, here, run or in_process, parallelism)

    def look(self, partition: int = 0) -> Looked:
        return asyncio.run(self._with_tier(lambda tier: self._look(tier, partition)))

    def objects(self) -> list[str]:
        """The objects of segments."""
        names = [path.name for path in (self.stored or self.folder / "remote").rglob("*") if path.is_file()]
        return sorted(name for name in names if name.endswith((".log", ".indexes")))

    def unnamed(self, *partitions: int) -> list[str]:
        """Objects of segments that no record names."""
        looked = [self.look(partition) for partition in partitions or (0,)]
        named = {str(one.segment_id.id) for each in looked for one in (*each.segments, *each.unfinished)}
        return [name for name in self.objects() if not any(uuid in name for uuid in named)]

    async def _with_tier(self, work: Callable[[OpenTier], Awaitable[T]]) -> T:
        async with open_tier(self.config) as tier:
            return await work(tier)

    async def _look(self, tier: OpenTier, number: int) -> Looked:
        partition = await topic_id_partition(tier.client, self.topic, number)
        segments = readable_segments(tier, partition)
        all_of_it = list(tier.state.list_remote_log_segments(partition))
        remote = [bytes(await tier.storage.fetch_log_segment(one, 0, one.segment_size_bytes)) for one in segments]
        for one in segments:
            assert (await verify_segment(tier.storage, one, tier.key_ring)).damages == ()
        return Looked(
            segments,
            [one for one in all_of_it if one.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED],
            b"".join(remote),
            await whole_log(BrokerLogSource(tier.client), partition),
        )


def check_all_is_remote_once(rig: OffloadRig, *partitions: int, others: Sequence[str] = ()) -> None:
    """Checks the partitions of a topic, and that the store has no other objects than those and `others`."""
    segments = 0
    for partition in partitions or (0,):
        looked = rig.look(partition)
        assert looked.remote_bytes == looked.log_bytes
        assert looked.unfinished == []
        ends = [end for _, end in looked.ranges]
        assert [start for start, _ in looked.ranges] == [0, *(end + 1 for end in ends[:-1])]
        segments += len(looked.segments)
    assert len(set(rig.objects()) - set(others)) == 2 * segments


def in_process(tasks: Sequence[OffloadTask]) -> list[OffloadResult]:
    return [copy_tiles(task) for task in tasks]


async def whole_log(source: BrokerLogSource, partition: TopicIdPartition) -> bytes:
    bounds = await source.bounds(partition, TIMEOUT_MS)
    offset, pieces = bounds.log_start_offset, []
    while offset < bounds.last_stable_offset:
        read = await source.read(partition, offset, 1 << 20, TIMEOUT_MS)
        pieces.append(read.records)
        for batch in iterate_batches(read.records):  # of a broker without the time for any there are none
            offset = batch.next_offset
    return b"".join(pieces)


def offload_rig(kafka: KafkaCluster, folder: Path, topic: str, storage: str | None = None) -> OffloadRig:
    """Also makes the metadata topic, as the first proxy would. `storage`: a section; else a folder."""
    (folder / "remote").mkdir(exist_ok=True)
    metadata = f"__metadata-{topic}"
    text = f"""
remote.log.metadata.topic.name = "{metadata}"
remote.log.metadata.topic.num.partitions = 4
[upstream]
bootstrap.servers = "{kafka.bootstrap_servers}"
[state]
path = "{folder / "state"}"
{storage or f'[storage]{chr(10)}implementation = "local"{chr(10)}path = "{folder / "remote"}"'}
[[topics]]
name = "{topic}*"
segment.bytes = {SEGMENT_BYTES}
segment.ms = "1h"
local.retention.bytes = 1
"""
    asyncio.run(_make_metadata_topic(kafka, folder, metadata))
    return OffloadRig(kafka, folder, topic, text)


def filled(kafka: KafkaCluster, folder: Path, topic: str, partitions: int = 1, records: int = 200) -> OffloadRig:
    """An `offload_rig` with a new topic, which has records in each partition."""
    create_topic(kafka.bootstrap_servers, topic, partitions=partitions)
    for partition in range(partitions):
        produce(kafka.bootstrap_servers, topic, random_values(records), partition=partition)
    return offload_rig(kafka, folder, topic)


async def _make_metadata_topic(kafka: KafkaCluster, folder: Path, name: str) -> None:
    async with AsyncExitStack() as stack:
        client = BrokerClient([kafka.address()], client_id="test")
        stack.push_async_callback(client.close)
        settings = TopicBasedSettings(folder / "maker", topic=MetadataTopicSettings(name, 4), is_member=False)
        manager = TopicBasedMetadataLog(client, settings)
        stack.push_async_callback(manager.close)
        await manager.open()
