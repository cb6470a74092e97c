"""Exports of a log whose end was replaced, as after an unclean election."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog import load_catalog

from pipeline.config import PipelineConfig
from pipeline.decode.arrow_records import decode_batches
from pipeline.decode.record_columns import RecordColumns
from pipeline.export import job
from pipeline.export.job import ExportRequest, IcebergTable, check_history, export_by
from pipeline.export.ledger import TileResult
from pipeline.export.plan import Exported, PlannedTile
from pipeline.export.target import TargetSettings
from pipeline.source.read_plan import LocalRange, ReadRange
from pipeline.source.tiered_log import LogBounds
from pipeline.spark.job import JobError
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tiers.metadata.log_history import confirms
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch

PARTITION = TopicIdPartition(uuid.UUID(int=5), 0, "orders")
EXPORTED = Exported({0: 20}, leader_epochs={0: 0})


async def check(log: InMemoryLog, exported: Exported = EXPORTED) -> None:
    await check_history(partial(confirms, log, timeout_ms=1_000), {0: PARTITION}, exported)


async def test_a_log_with_the_exported_records_goes_on() -> None:
    log = InMemoryLog()
    log.append(batch_of(0, 20), batch_of(20, 10, leader_epoch=1))
    log.leader_epoch = 1
    await check(log)
    log.log_start_offset = 25
    await check(log)


async def test_records_in_the_place_of_exported_ones_are_not_skipped() -> None:
    """The log has grown past the end of the export again, so its offsets alone look right."""
    log = InMemoryLog()
    log.append(batch_of(0, 10), batch_of(10, 20, leader_epoch=1))
    log.leader_epoch = 1
    with pytest.raises(JobError, match="another history now: export the topic to another place"):
        await check(log)
    await check(log, Exported({0: 20}))


class OneLog:
    """The log that the job reads, over a leader's log of one partition."""

    cluster_id = ""

    def __init__(self, log: InMemoryLog) -> None:
        self._log = log

    async def partitions(self) -> list[TopicIdPartition]:
        return [PARTITION]

    async def bounds(self, partitions: Sequence[TopicIdPartition]) -> dict[TopicIdPartition, LogBounds]:
        return {PARTITION: LogBounds(0, 0, self._log.end_offset, self._log.leader_epoch)}

    async def confirms(self, partition: TopicIdPartition, position: OffsetAndEpoch) -> bool:
        assert partition == PARTITION
        return await confirms(self._log, partition, position, 1_000)

    def ranges(self, partition: TopicIdPartition, bounds: LogBounds, first: int, end: int) -> list[ReadRange]:
        return [LocalRange(partition, first, end, record_bytes=1)]

    @asynccontextmanager
    async def open(self, options: object) -> AsyncIterator[OneLog]:
        yield self

    def reader(self, *options: object) -> OneLog:
        return self

    def read(self, ranges: Sequence[ReadRange], columns: RecordColumns) -> Iterator[pa.RecordBatch]:
        """As a reader that may lose data: it skips offsets above the log end, and waits for a record at the end."""
        for one in ranges:
            if one.first_offset > self._log.end_offset:
                continue
            if one.first_offset == self._log.end_offset:
                self._log.append(batch_of(one.first_offset, 1, timestamp=4_000, leader_epoch=self._log.leader_epoch))
            yield from decode_batches(
                self._log.bytes_of(one.first_offset, one.end_offset),
                topic=PARTITION.topic,
                partition=PARTITION.partition,
                first_offset=one.first_offset,
                end_offset=one.end_offset,
                columns=columns,
                is_committed_only=True,
            )


class KilledError(Exception):
    pass


def run(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
    return [task(one) for one in plan]


def run_killed(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
    run(what, plan, task)
    raise KilledError


class TableExport:
    """Exports of a log to an Iceberg table."""

    def __init__(self, home: Path, log: InMemoryLog, monkeypatch: pytest.MonkeyPatch) -> None:
        (home / "warehouse").mkdir()
        warehouse = (home / "warehouse").as_uri()
        properties = {"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": warehouse}
        table = IcebergTable("lake", "db.orders", properties)
        target = TargetSettings((home / "lake").as_uri())
        self._request = ExportRequest("orders", target, table, is_loss_allowed=True)
        monkeypatch.setattr(job, "open_log", OneLog(log).open)
        monkeypatch.setattr(job, "RangeReader", OneLog(log).reader)

    def run(self, runner: job.RunTasks = run) -> None:
        config = PipelineConfig.model_construct(upstream=None)
        export_by(runner, config, self._request)

    def times_ms(self) -> list[int]:
        """Returns the timestamps of the table's records, in the order of their offsets."""
        assert self._request.iceberg is not None
        table = load_catalog("lake", **self._request.iceberg.properties).load_table("db.orders")
        rows = table.scan().to_arrow().sort_by("offset").to_pylist()
        return [round(row["timestamp"].timestamp() * 1000) for row in rows]


@pytest.fixture
def log() -> InMemoryLog:
    return InMemoryLog()


@pytest.fixture
def table(tmp_path: Path, log: InMemoryLog, monkeypatch: pytest.MonkeyPatch) -> TableExport:
    return TableExport(tmp_path, log, monkeypatch)


def test_files_of_a_killed_run_count_in_their_own_history_alone(
    table: TableExport, log: InMemoryLog, tmp_path: Path
) -> None:
    log.append(batch_of(0, 3, timestamp=1_000))
    table.run()
    log.append(batch_of(3, 3, timestamp=2_000))
    with pytest.raises(KilledError):
        table.run(run_killed)
    log.elect_unclean(3)
    log.append(batch_of(3, 3, timestamp=3_000, leader_epoch=1))
    with pytest.raises(
        JobError, match=r"3-5\.parquet was written in leader epoch 0.*another history now: move it away"
    ):
        table.run()
    (left,) = tmp_path.rglob("3-5.parquet")
    left.unlink()
    table.run()
    assert table.times_ms() == [1_000, 1_001, 1_002, 3_000, 3_001, 3_002]


def test_another_election_keeps_the_files_of_a_killed_run(table: TableExport, log: InMemoryLog) -> None:
    log.append(batch_of(0, 3, timestamp=1_000))
    with pytest.raises(KilledError):
        table.run(run_killed)
    log.leader_epoch = 1
    log.append(batch_of(3, 1, timestamp=2_000, leader_epoch=1))
    table.run()
    assert table.times_ms() == [1_000, 1_001, 1_002, 2_000]


def test_no_file_reaches_beyond_the_log_of_a_new_leader(
    log: InMemoryLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records arrive later at offsets where the old leader had some when the run began."""
    monkeypatch.setattr(job, "open_log", OneLog(log).open)
    monkeypatch.setattr(job, "RangeReader", OneLog(log).reader)
    target = TargetSettings(tmp_path.as_uri())
    request = ExportRequest("orders", target, file_bytes=1, is_loss_allowed=True)
    config = PipelineConfig.model_construct(upstream=None)

    def run_and_elect(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
        results = run(what, plan[::-1], task)[::-1]
        if log.leader_epoch == 0:
            log.elect_unclean(2)
        return results

    log.append(batch_of(0, 1), batch_of(1, 1))
    with pytest.raises(KilledError):
        export_by(run_killed, config, request)
    log.append(batch_of(2, 3))
    export_by(run_and_elect, config, request)
    log.append(*(batch_of(offset, 1, leader_epoch=1) for offset in range(log.end_offset, 6)))
    export_by(run, config, request)
    exported = pa.concat_tables(pq.read_table(file) for file in tmp_path.rglob("[0-9]*.parquet"))
    assert sorted(exported["offset"].to_pylist()) == [0, 1, 2, 3, 4, 5]
