"""Every job over one topic in a real S3: copy, read, merge, export, damage, repair, delete."""

from __future__ import annotations

import asyncio
import io
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pyarrow.parquet as pq
import pytest

from pipeline.config import PipelineConfig
from pipeline.export.job import ExportRequest, export_by
from pipeline.export.ledger import TileResult
from pipeline.export.plan import PlannedTile
from pipeline.export.target import open_target, target_settings
from pipeline.maintenance.indexes_task import Verdict
from pipeline.maintenance.merge import merge
from pipeline.maintenance.merge_plan import MergeLimits
from pipeline.maintenance.rebuild import rebuild, rebuild_indexes
from pipeline.maintenance.scrub import ScrubOptions, scrub_tier
from pipeline.maintenance.scrub_report import ScrubLevel, ScrubReport
from pipeline.maintenance.usage import UsageBy, usage
from pipeline.worker import worker
from tests.support.pipeline.inline_runner import InlineRunner
from tests.support.pipeline.offload_rig import OffloadRig, offload_rig
from tests.support.pipeline.read_stage import CODECS, ReadStage, Row, rows_of
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, delete_topics
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tests.support.servers.versitygw import VersityGateway
from tiers.access.open_tier import OpenTier, open_tier, readable_segments
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import indexes_key, log_key, marked_cluster
from tiers.upkeep.rebuild import RebuildOptions

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("patient_claims")]

T = TypeVar("T")
RUNNER = InlineRunner()
LIMITS = MergeLimits(below_bytes=80_000, target_bytes=200_000)


@dataclass
class Site:
    """The tier's store, a place for exports in the same bucket, and a proxy over the tier."""

    rig: OffloadRig
    lake: str
    proxy: Callable[[], TidegateProcess]

    @property
    def config(self) -> PipelineConfig:
        return self.rig.config

    def with_tier(self, work: Callable[[OpenTier], Awaitable[T]], config: PipelineConfig | None = None) -> T:
        async def opened() -> T:
            async with open_tier(config or self.config) as tier:
                return await work(tier)

        return worker().run(opened())

    def segments(self, config: PipelineConfig | None = None) -> list[RemoteLogSegmentMetadata]:
        async def listed(tier: OpenTier) -> list[RemoteLogSegmentMetadata]:
            return [each for one in tier.state.partitions() for each in readable_segments(tier, one)]

        return sorted(
            self.with_tier(listed, config), key=lambda each: (each.topic_id_partition.partition, each.start_offset)
        )

    def objects(self) -> dict[str, int]:
        """Sizes by key, of all that the store has of the topic. The marker of the tier is of none."""

        async def listed(tier: OpenTier) -> dict[str, int]:
            stored = {each.key: each.size_bytes async for each in tier.storage.list_objects("")}
            return {key: size_bytes for key, size_bytes in stored.items() if marked_cluster(key) is None}

        return self.with_tier(listed)

    def scrub(self) -> ScrubReport:
        options = ScrubOptions(ScrubLevel.DEEP, grace_ms=0)
        return self.with_tier(lambda tier: scrub_tier(tier, self.config, RUNNER, options))

    def request(self) -> ExportRequest:
        target = target_settings(self.lake, self.config, {})
        return ExportRequest(self.rig.topic, target, include_headers=True, file_bytes=60_000, wave_files=2)

    def file_rows(self) -> list[Row]:
        target = open_target(self.request().target)
        names = [name for name in target.names("") if name.endswith(".parquet")]
        tables = [pq.read_table(io.BytesIO(target.read(name))) for name in names]
        return sorted((row for table in tables for row in table.to_pylist()), key=_position)


def _position(row: Row) -> tuple[int, int]:
    return row["partition"], row["offset"]


def here(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
    return [task(one) for one in plan]


@pytest.fixture
def site(s3: VersityGateway, kafka_of_three: KafkaCluster, tmp_path: Path) -> Site:
    name = f"jobs-{uuid.uuid4().hex[:8]}"
    worker().run(s3.create_bucket(name))
    create_topic(kafka_of_three.bootstrap_servers, name, partitions=2, config={"retention.ms": "-1"})
    storage = {"implementation": "s3", **s3.settings(name), "prefix": "tier"}
    rig = rig_of(kafka_of_three, tmp_path, name, storage)
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{name}",
        "remote.log.visible.after.ms": 500,
        "remote.log.topic.deletion.delay.ms": 1000,
    }
    (tmp_path / "proxy").mkdir()

    def proxy() -> TidegateProcess:
        return tidegate_over(kafka_of_three, tmp_path / "proxy", tiered=[name], storage=storage, settings=settings)

    return Site(rig, f"s3://{name}/lake", proxy)


def rig_of(kafka: KafkaCluster, folder: Path, topic: str, storage: dict[str, str]) -> OffloadRig:
    section = "\n".join(["[storage]", *(f'{key} = "{value}"' for key, value in storage.items())])
    rig = offload_rig(kafka, folder, topic, section)
    return replace(rig, text=f"remote.log.visible.after.ms = 500\n{rig.text}")


def produced(site: Site, folder: Path) -> tuple[ReadStage, dict[str, str]]:
    """The produced records, and a read of them from the store alone."""
    config = folder / "pipeline.toml"
    config.write_text(site.rig.text)
    proxy: Any = SimpleNamespace(config=config)
    stage = ReadStage(site.rig.kafka, proxy, folder, site.rig.topic)
    for codec in CODECS:
        stage.produce(120, codec=codec)
    stage.produce_in_transaction(60, commit=False)
    stage.produce_in_transaction(60, commit=True)
    stage.produce(60, partition=1)
    options = {"tier": "remote", "includeHeaders": "true", "kafka.isolation.level": "read_committed"}
    return stage, stage.options | options


def test_all_jobs_over_a_topic(site: Site, tmp_path: Path) -> None:
    stage, options = produced(site, tmp_path)
    rows = stage.expected(is_committed_only=True)
    report = site.rig.offload()
    assert (report.troubles, [one.left_bytes for one in report.partitions]) == ([], [0, 0])
    assert rows_of(options) == rows

    check_an_export_that_is_ended_goes_on(site, rows)

    before = site.segments()
    done = asyncio.run(merge(site.config, RUNNER, site.rig.topic, LIMITS))
    assert done.failed == []
    assert len(done.merged) >= 1
    parts = {str(each.segment_id.id) for each in done.replaced}
    with site.proxy():
        until(lambda: not any(part in key for key in site.objects() for part in parts))
    merged = site.segments()
    assert 1 < len(merged) < len(before)
    assert rows_of(options) == rows

    whole = site.scrub()
    assert whole.findings == []
    assert (whole.segments, whole.records) == (len(merged), len(stage.rows))

    objects = site.objects()
    assert whole.stored_bytes == sum(objects.values())
    [line] = asyncio.run(usage(site.config, UsageBy.TOPIC))
    logs = sum(size_bytes for key, size_bytes in objects.items() if key.endswith(".log"))
    assert (line.log_bytes, line.unfinished_bytes) == (logs, 0)

    into = f"{site.config.remote_log.metadata_topic}-again"
    rebuilt = asyncio.run(rebuild(site.config, RUNNER, RebuildOptions(into=into, is_applied=True)))
    assert (rebuilt.written, rebuilt.undecided) == (True, [])
    remote_log = site.config.remote_log.model_copy(update={"metadata_topic": into})
    again = site.segments(site.config.model_copy(update={"remote_log": remote_log}))
    assert [replace(each, event_timestamp_ms=0, broker_id=0) for each in again] == [
        replace(each, event_timestamp_ms=0, broker_id=0) for each in merged
    ]

    check_damage_is_found_and_mended(site, merged)
    assert rows_of(options) == rows

    topic_id = site.segments()[0].topic_id_partition.topic_id
    delete_topics(site.rig.kafka.bootstrap_servers, site.rig.topic)
    site.with_tier(lambda tier: tier.metadata.put_topic_deletion(topic_id, site.rig.topic, is_confirmed=True))
    with site.proxy():
        until(lambda: site.objects() == {})
    assert site.file_rows() == rows


class Ended(Exception):
    pass


def check_an_export_that_is_ended_goes_on(site: Site, rows: list[Row]) -> None:
    """Between the files of its second wave and their publication, as a kill would."""
    waves = 0

    def ended(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
        nonlocal waves
        results = here(what, plan, task)
        waves += 1
        if waves == 2:
            raise Ended
        return results

    request = site.request()
    target = open_target(request.target)
    with pytest.raises(Ended):
        export_by(ended, site.config, request)
    seen = site.file_rows()
    for partition in (0, 1):
        of_it = [row for row in seen if row["partition"] == partition]
        assert of_it == [row for row in rows if row["partition"] == partition][: len(of_it)]
    assert 0 < len(seen) < len(rows)
    [topic_id] = {one.topic_id_partition.topic_id for one in site.segments()}
    assert len(target.staged(f"{topic_id}/")) == request.wave_files
    result = export_by(here, site.config, request)
    assert (result.has_findings, result.records) == (False, len(rows) - len(seen))
    assert site.file_rows() == rows
    assert target.staged(f"{topic_id}/") == []


def check_damage_is_found_and_mended(site: Site, segments: list[RemoteLogSegmentMetadata]) -> None:
    damaged, lost = segments[0], segments[1]

    async def damage(tier: OpenTier) -> bytes:
        await tier.storage.delete_object(indexes_key(tier.cluster_id, lost))
        key = log_key(tier.cluster_id, damaged)
        data = bytes(await tier.storage.get_object(key))
        await tier.storage.put_object(key, data[:1000] + bytes((data[1000] ^ 1,)) + data[1001:])
        return data

    data = site.with_tier(damage)
    found = site.scrub().findings
    assert {(each.kind.value, each.segment) for each in found} == {
        ("damaged", str(damaged.segment_id.id)),
        ("missing", str(lost.segment_id.id)),
    }

    async def mend(tier: OpenTier) -> None:
        await tier.storage.put_object(log_key(tier.cluster_id, damaged), data)

    site.with_tier(mend)
    made = asyncio.run(rebuild_indexes(site.config, RUNNER, site.rig.topic, is_applied=True))
    assert [each.segment.segment_id for each in made if each.verdict is Verdict.WRITTEN] == [lost.segment_id]
    assert site.scrub().findings == []
