"""Executors find in a store what one process finds. Indexes that cannot be rebuilt are left alone."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from struct import pack
from types import SimpleNamespace

import pytest

from pipeline.config import PipelineConfig, parse_pipeline_config
from pipeline.maintenance.indexes_task import Verdict, make_indexes
from pipeline.maintenance.rebuild import plan_indexes, rebuild_indexes
from pipeline.worker import TierStore, worker
from tests.support.fakes.segments import PARTITION
from tests.support.pipeline.inline_runner import InlineRunner
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench, command_bench
from tiers.access.open_tier import RemoteTierError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import MAGIC, VERSION, encode_sections
from tiers.segment.segment_encryption import KeyRing
from tiers.upkeep.rebuild import plan_rebuild
from tiers.upkeep.runner import HereRunner, OpenedStore


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[CommandBench]:
    async with command_bench(tmp_path) as made:
        yield made


def config_of(bench: CommandBench) -> PipelineConfig:
    return parse_pipeline_config(
        f'[upstream]\nbootstrap.servers = "localhost:1"\n'
        f'[storage]\nimplementation = "local"\npath = "{bench.root}"\ncluster.id = "{CLUSTER_ID}"\n'
    )


async def test_executors_find_what_one_process_finds(bench: CommandBench) -> None:
    for start in (0, 10, 20):
        await bench.tiered(start)
    await bench.put_facts()
    unnamed = await bench.stored(30)
    await bench.stored(50)
    damaged = next(file for file in bench.files() if str(unnamed.segment_id.id) in file.name and file.suffix == ".log")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    one = await plan_rebuild(OpenedStore(bench.storage, CLUSTER_ID, bench.ring), HereRunner())
    many = await plan_rebuild(TierStore(config_of(bench), CLUSTER_ID), InlineRunner())
    assert many.plans == one.plans
    [plan] = many.plans
    assert [each.start_offset for each in plan.segments] == [0, 10, 20, 30, 50]
    assert plan.unsure == plan.segments[-1:]


def made(
    bench: CommandBench, segments: list[RemoteLogSegmentMetadata], *, is_applied: bool = True
) -> list[tuple[Verdict, str]]:
    plan = plan_indexes(config_of(bench), CLUSTER_ID, segments, is_applied=is_applied, segments_per_task=2)
    return [(each.verdict, each.what) for task in plan for each in worker().run(make_indexes(task))]


def lose(bench: CommandBench, segment: RemoteLogSegmentMetadata) -> Path:
    [path] = [
        each for each in bench.files() if each.stem.endswith(str(segment.segment_id.id)) and each.suffix != ".log"
    ]
    path.unlink()
    return path


async def test_indexes_are_made_anew_run_by_run_and_nothing_is_written_unasked(bench: CommandBench) -> None:
    segments = [await bench.tiered(start) for start in (0, 10, 20, 40)]
    for segment in (segments[0], segments[3]):
        lose(bench, segment)
    before = bench.files()
    seen = [verdict for verdict, _ in await asyncio.to_thread(made, bench, segments, is_applied=False)]
    assert seen == [Verdict.LOST, Verdict.WHOLE, Verdict.WHOLE, Verdict.LOST]
    assert bench.files() == before
    written = await asyncio.to_thread(made, bench, segments)
    assert written[0] == (Verdict.WRITTEN, "the .indexes object is missing")
    assert written[3] == (Verdict.WRITTEN, "the .indexes object is missing; the state before it is not known")
    assert {verdict for verdict, _ in await asyncio.to_thread(made, bench, segments)} == {Verdict.WHOLE}


async def test_indexes_that_cannot_be_rebuilt_are_refused_and_left_alone(bench: CommandBench) -> None:
    """Those of a later format, of no log, of a torn one, and of one whose key is lost."""
    later, no_log, torn = [await bench.tiered(start) for start in (0, 10, 20)]
    bench.ring = KeyRing({"old": bytes(32)}, "old")
    encrypted = await bench.tiered(30)
    paths = [lose(bench, each) for each in (later, no_log, torn, encrypted)]
    written_later = encode_sections({}).replace(MAGIC + pack(">h", VERSION), MAGIC + pack(">h", VERSION + 1))
    paths[0].write_bytes(written_later)
    paths[1].with_suffix(".log").unlink()
    log = paths[2].with_suffix(".log")
    log.write_bytes(log.read_bytes()[:-5])
    found = await asyncio.to_thread(made, bench, [later, no_log, torn, encrypted])
    for (verdict, what), said in zip(
        found, (f"version {VERSION + 1}", "no such object", "not a whole record batch", "it is encrypted"), strict=True
    ):
        assert verdict is Verdict.REFUSED
        assert said in what
    assert paths[0].read_bytes() == written_later


async def test_a_full_disk_of_an_executor_refuses_one_and_ends_no_run(
    bench: CommandBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spark, scratch = tmp_path / "spark", list[str]()
    spark.mkdir()

    def full(*args: object) -> None:
        scratch.extend(each.name for each in spark.iterdir())
        raise OSError(errno.ENOSPC, "No space left on device")

    segments = [await bench.tiered(start) for start in (0, 10)]
    lose(bench, segments[0])
    monkeypatch.setattr("pipeline.maintenance.indexes_task.LogIndexer.append", full)
    monkeypatch.setenv("SPARK_LOCAL_DIRS", str(spark))
    (refused, what), (whole, _) = await asyncio.to_thread(made, bench, segments)
    assert (refused, whole) == (Verdict.REFUSED, Verdict.WHOLE)
    assert "No space left" in what
    assert [each.startswith("tidegate-indexes-") for each in scratch] == [True]
    assert list(spark.iterdir()) == []


async def test_indexes_need_the_metadata(bench: CommandBench, monkeypatch: pytest.MonkeyPatch) -> None:
    @asynccontextmanager
    async def without_metadata(*_: object, **__: object) -> AsyncIterator[tuple[None, SimpleNamespace]]:
        yield None, SimpleNamespace(cluster_id=CLUSTER_ID, topics={})

    monkeypatch.setattr("pipeline.maintenance.rebuild.tiered_cluster", without_metadata)
    with pytest.raises(RemoteTierError, match="rebuild the metadata first"):
        await rebuild_indexes(config_of(bench), InlineRunner(), ".*", is_applied=False)


def test_only_neighbours_without_a_gap_tell_anything_of_each_other(bench: CommandBench) -> None:
    def segment(start: int, end: int, cut: int | None = None) -> RemoteLogSegmentMetadata:
        made = asyncio.run(bench.stored(start))
        return replace(made, end_offset=end, cut_at=cut)

    segments = [segment(0, 9), segment(10, 19), segment(30, 39, 35), segment(40, 49), segment(50, 59), segment(60, 69)]
    plan = plan_indexes(config_of(bench), CLUSTER_ID, reversed(segments), is_applied=False, segments_per_task=2)
    assert plan[0].segments[0].topic_id_partition == PARTITION

    def starts(*some: RemoteLogSegmentMetadata | None) -> list[int | None]:
        return [None if each is None else each.start_offset for each in some]

    assert [starts(task.before, *task.segments, task.after) for task in plan] == [
        [None, 0, 10, None],
        [None, 30, None],
        [None, 40, 50, 60],
        [50, 60, None],
    ]
