"""Exports of a log in memory, to an Iceberg table or to plain files."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog import Catalog, load_catalog

from pipeline.config import PipelineConfig
from pipeline.decode.arrow_records import decode_batches
from pipeline.decode.record_columns import RecordColumns
from pipeline.export import job
from pipeline.export.job import ExportRequest, ExportResult, IcebergTable, export_by
from pipeline.export.ledger import TileResult
from pipeline.export.plan import PlannedTile
from pipeline.export.target import TargetSettings
from pipeline.source.read_plan import LocalRange, MissingOffsets, ReadRange
from pipeline.source.tiered_log import LogBounds
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tiers.metadata.log_history import confirms
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch

PARTITION = TopicIdPartition(uuid.UUID(int=5), 0, "orders")
TABLE = "db.orders"


class OneLog:
    """The log that the job reads, over a leader's log of one partition."""

    cluster_id = ""
    lost: Sequence[MissingOffsets] = ()

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
        self.home = home
        (home / "warehouse").mkdir()
        warehouse = (home / "warehouse").as_uri()
        properties = {"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": warehouse}
        table = IcebergTable("lake", TABLE, properties)
        target = TargetSettings((home / "lake").as_uri())
        self.request = ExportRequest("orders", target, table, is_loss_allowed=True)
        monkeypatch.setattr(job, "open_log", OneLog(log).open)
        monkeypatch.setattr(job, "RangeReader", OneLog(log).reader)

    def run(self, runner: job.RunTasks = run) -> ExportResult:
        return export_by(runner, PipelineConfig.model_construct(upstream=None), self.request)

    def catalog(self) -> Catalog:
        assert self.request.iceberg is not None
        return load_catalog("lake", **self.request.iceberg.properties)

    def times_ms(self) -> list[int]:
        """Returns the timestamps of the table's records, in the order of their offsets."""
        rows = self.catalog().load_table(TABLE).scan().to_arrow().sort_by("offset").to_pylist()
        return [round(row["timestamp"].timestamp() * 1000) for row in rows]
