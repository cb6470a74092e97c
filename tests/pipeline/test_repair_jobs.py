"""A merge against a real Kafka and a real proxy, while a client reads the records."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from pipeline.config import PipelineConfig, load_pipeline_config
from pipeline.maintenance.merge import merge, plan_merge
from pipeline.maintenance.merge_plan import MergeLimits
from tests.support.pipeline.inline_runner import InlineRunner
from tests.support.rigs.strict_consumer import (
    RECORD,
    consumer_at,
    log_bytes,
    read,
    until_trimmed,
)
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tiers.access.open_tier import open_tier
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.upkeep.runner import Task

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("patient_claims")]

P = TypeVar("P")
R = TypeVar("R")

RECORDS = 1200
SEGMENT_BYTES = 30_000
LIMITS = MergeLimits(below_bytes=100_000, target_bytes=150_000)


@dataclass
class Tiered:
    kafka: KafkaCluster
    proxy: TidegateProcess
    topic: str
    config: PipelineConfig
    records: list[RECORD]
    store: Path

    def segments(self) -> list[RemoteLogSegmentMetadata]:
        async def listed() -> list[RemoteLogSegmentMetadata]:
            async with open_tier(self.config) as tier:
                [partition] = [each for each in tier.state.partitions() if each.topic == self.topic]
                return list(tier.state.list_remote_log_segments(partition))

        return asyncio.run(listed())

    def files(self, segment: RemoteLogSegmentMetadata) -> list[Path]:
        """`.indexes`, `.log`."""
        return sorted(self.store.rglob(f"*{segment.segment_id.id}*"))

    def is_at_rest(self) -> bool:
        """Nothing is being copied, and what is not yet waits for more."""
        segments = self.segments()
        is_copying = any(each.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED for each in segments)
        return not is_copying and log_bytes(self.kafka, self.topic, segments[-1].end_offset + 1) <= SEGMENT_BYTES

    def read_all(self) -> list[RECORD]:
        with consumer_at(self.proxy.bootstrap_servers, self.topic, 0) as consumer:
            return read(consumer, len(self.records))


@pytest.fixture(scope="module")
def tiered(kafka_of_three: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    kafka, topic = kafka_of_three, f"repair-{uuid.uuid4().hex[:8]}"
    create_topic(kafka.bootstrap_servers, topic)
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic}",
        "remote.log.metadata.topic.num.partitions": 2,
        "remote.log.visible.after.ms": 1000,
        "remote.log.manager.task.interval.ms": 200,
    }
    rule = (
        f'[[topics]]\nname = "{topic}"\nlocal.retention.bytes = 1\nsegment.bytes = {SEGMENT_BYTES}\nsegment.ms = "1h"\n'
    )
    folder = tmp_path_factory.mktemp("repair")
    with tidegate_over(kafka, folder, settings=settings, more=rule) as proxy:
        records = [(number, b"%d-" % number * 60) for number in range(RECORDS)]
        produce(kafka.bootstrap_servers, topic, (value for _, value in records))
        until_trimmed(kafka, topic, 1000)
        tiered = Tiered(kafka, proxy, topic, load_pipeline_config(proxy.config), records, folder / "tier")
        until(tiered.is_at_rest)
        yield tiered


class ReadMeanwhile(InlineRunner):
    """Tasks have not ended before all was read once more, from then on."""

    def __init__(self, rounds: list[list[RECORD]]) -> None:
        super().__init__()
        self.rounds = rounds

    async def run(self, what: str, plan: Sequence[P], task: Task[P, R]) -> list[R]:
        results = await super().run(what, plan, task)
        begun = len(self.rounds)
        await asyncio.to_thread(until, lambda: len(self.rounds) > begun + 1)  # the first of them may have begun before
        return results


def test_a_consumer_reads_every_record_while_segments_are_merged(tiered: Tiered) -> None:
    before = tiered.segments()
    assert len(before) > 8
    planned = asyncio.run(plan_merge(tiered.config, tiered.topic, LIMITS)).planned
    assert tiered.segments() == before
    ended = threading.Event()
    rounds: list[list[RECORD]] = []

    def read_on() -> None:
        while not ended.is_set():
            rounds.append(tiered.read_all())

    reader = threading.Thread(target=read_on)
    reader.start()
    try:
        done = asyncio.run(merge(tiered.config, ReadMeanwhile(rounds), tiered.topic, LIMITS))
        until(lambda: all(tiered.files(each) == [] for each in done.replaced))  # the proxy deletes them
        rounds.append(tiered.read_all())
    finally:
        ended.set()
        reader.join()
    assert all(each == tiered.records for each in rounds)
    parts = {each.segment_id for group in planned for each in group.parts}
    assert (done.failed, {each.segment_id for each in done.replaced}) == ([], parts)
    after = tiered.segments()
    assert len(after) == len(before) - len(parts) + len(planned)
    assert [each.end_offset + 1 for each in after[:-1]] == [each.start_offset for each in after[1:]]
