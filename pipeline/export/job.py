"""`export`: exports one topic of both tiers to Parquet files or an Iceberg table, each record exactly once.

The driver plans tiles and keeps the ledger. The executors read, decode and write one file per tile; record bytes never
reach the JVM. A run exports the records that existed when it began (up to the last stable offset with read_committed).
A run may end at any moment: the next run continues from the ledger. A batch that cannot be read stops its partition at
that offset. The run exports the records before it, reports the stop, and continues with the other partitions.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from uuid import UUID, uuid4

import pyarrow as pa

from pipeline.chosen_partitions import NothingChosenError
from pipeline.config import PipelineConfig
from pipeline.decode.record_columns import ALL_COLUMNS, KAFKA_COLUMNS, RecordColumns
from pipeline.export.ledger import ExportLedger, ParquetLedger, TileResult
from pipeline.export.parquet_writer import write_parquet, write_parts
from pipeline.export.plan import Exported, ExportPlan, PlannedTile, Tile, plan_export
from pipeline.export.target import TargetSettings, open_target
from pipeline.export.typed_values import TypedValues
from pipeline.source.local_read import TIMEOUT_MS
from pipeline.source.options import (
    DEFAULT_SPLIT_BYTES,
    EARLIEST,
    LATEST,
    Access,
    OptionError,
    Position,
    ReadOptions,
    Subscription,
    Tier,
)
from pipeline.source.range_read import RangeReader
from pipeline.source.tiered_log import AccessDeniedError, open_log
from pipeline.spark.scratch import scratch_folder
from pipeline.worker import on_thread, worker
from protocol.errors import CorruptBatchError, ErrorCode
from tiers.bounded_gather import bounded_gather
from tiers.errors import BrokerError, CorruptSegmentError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch
from tiers.upkeep.runner import JobError, Runner

if TYPE_CHECKING:
    from pipeline.export.table_format import TableFormat

logger = logging.getLogger(__name__)

FILE_BYTES = 256 << 20
"""Bytes of the log per file. The file itself is usually smaller."""
WAVE_FILES = 64
_FRUITLESS_ROUNDS = 5
_PARTITIONS_AT_ONCE = 16

Confirms = Callable[[TopicIdPartition, OffsetAndEpoch], Awaitable[bool]]
RunTasks = Callable[[str, Sequence[PlannedTile], Callable[[PlannedTile], TileResult]], list[TileResult]]


@dataclass(frozen=True, slots=True)
class IcebergTable:
    catalog: str
    table: str
    """The name with its namespace, such as db.orders."""
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Properties of the catalog; they override pyiceberg's own configuration."""


@dataclass(frozen=True, slots=True)
class ExportRequest:
    topic: str
    target: TargetSettings
    iceberg: IcebergTable | None = None
    """If None, the export writes Parquet files only."""
    values: TypedValues | None = None
    include_headers: bool = False
    is_committed_only: bool = True
    tier: Literal["auto", "remote"] = "auto"
    is_loss_allowed: bool = False
    """Whether the export skips offsets that expired in both tiers since the last export."""
    file_bytes: int = FILE_BYTES
    wave_files: int = WAVE_FILES
    """Files per wave. A wave is one plan in the Parquet ledger, or one commit to the table."""

    @property
    def columns(self) -> RecordColumns:
        return ALL_COLUMNS if self.include_headers else KAFKA_COLUMNS

    @property
    def schema(self) -> pa.Schema:
        return self.columns.schema if self.values is None else self.values.schema(self.columns.schema)

    @property
    def layout(self) -> str:
        """Returns a digest that is equal for two exports whose files may lie in the same place."""
        typed = None if self.values is None else (self.values.kind, self.values.schema_text, self.values.confluent_id)
        text = f"{self.schema.to_string(show_schema_metadata=False)} {typed} {self.is_committed_only}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class ExportedPartition:
    """What this run did with one partition.

    The run wrote `first_offset` to `end_offset` (inclusive); both are None if it wrote nothing. `lost` holds inclusive
    ranges that exist in neither tier any more. `stopped_at` is the offset of the batch that cannot be read."""

    partition: int
    first_offset: int | None = None
    end_offset: int | None = None
    files: int = 0
    records: int = 0
    dead_letters: int = 0
    file_bytes: int = 0
    lost: tuple[tuple[int, int], ...] = ()
    stopped_at: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ExportResult:
    topic: str
    topic_id: UUID
    partitions: tuple[ExportedPartition, ...]

    @property
    def has_findings(self) -> bool:
        return any(one.stopped_at is not None or one.lost for one in self.partitions)

    @property
    def records(self) -> int:
        return sum(one.records for one in self.partitions)


@dataclass(frozen=True, slots=True)
class ExportTask:
    """The values that all tiles of a plan share. It travels to the executors. If `table` is None, the export writes
    plain files."""

    request: ExportRequest
    options: ReadOptions = field(repr=False)
    cluster_id: str
    topic_id: UUID
    table: TableFormat | None = None


class Waves(Enum):
    """The outcome of a plan.

    `DONE`: all of its tiles were written. `SOME`: some were, and the rest must be planned again. `FRUITLESS`: nothing
    was written, and all of it must be planned again."""

    DONE = auto()
    SOME = auto()
    FRUITLESS = auto()


@dataclass(frozen=True, slots=True)
class _Round:
    topic_id: UUID
    cluster_id: str
    ends: Mapping[int, int]
    plan: ExportPlan


def export(config: PipelineConfig, runner: Runner, request: ExportRequest) -> ExportResult:
    """Raises `JobError`, `TargetError`, `RemoteTierError`, and errors of stores and brokers."""

    def run(what: str, plan: Sequence[PlannedTile], task: Callable[[PlannedTile], TileResult]) -> list[TileResult]:
        return worker().run(runner.run(what, plan, partial(on_thread, task)))

    return export_by(run, config, request)


def export_by(run: RunTasks, config: PipelineConfig, request: ExportRequest) -> ExportResult:
    """Runs the export with `run` in place of a runner. `run` must return results in the order of the plan."""
    options = read_options(config, request)
    ledger = open_ledger(request)
    found: dict[int, ExportedPartition] = {}
    stops: dict[int, int] = {}
    ends: Mapping[int, int] = {}
    fruitless = 0
    while True:
        try:
            around = worker().run(_plan(options, request, ledger, ends, stops))
        except OptionError as error:
            raise NothingChosenError(str(error)) from error
        except AccessDeniedError as error:
            raise JobError(str(error)) from error
        ends = around.ends
        for partition in ends:
            found.setdefault(partition, ExportedPartition(partition))
        _note_lost(found, around.plan, request)
        if not around.plan.tiles:
            break
        waves = _waves(run, ledger, around, request, options, found, stops)
        if waves is Waves.DONE and around.plan.is_last:
            break
        fruitless = fruitless + 1 if waves is Waves.FRUITLESS else 0
        if fruitless >= _FRUITLESS_ROUNDS:
            raise JobError(
                f"{request.topic}: other exporters always commit first; this one wrote nothing in {fruitless} rounds"
            )
    return ExportResult(request.topic, around.topic_id, tuple(found[partition] for partition in sorted(found)))


def open_ledger(request: ExportRequest) -> ExportLedger:
    """Returns the ledger for the request. Raises `JobError`, `TargetError` and the store's errors."""
    target = open_target(request.target)
    target.require_atomic_creation()
    if request.iceberg is None:
        return ParquetLedger(target, request.topic, request.layout)
    from pipeline.export.iceberg import IcebergLedger, open_catalog  # pyiceberg is an optional dependency

    catalog = open_catalog(request.iceberg.catalog, request.iceberg.properties, request.target)
    return IcebergLedger(catalog, request.iceberg.table, target, request.topic, request.schema, request.layout)


def _waves(
    run: RunTasks,
    ledger: ExportLedger,
    around: _Round,
    request: ExportRequest,
    options: ReadOptions,
    found: dict[int, ExportedPartition],
    stops: dict[int, int],
) -> Waves:
    """Exports waves of the plan until the plan is done or must be made again."""
    task = ExportTask(request, options, around.cluster_id, around.topic_id, ledger.table)
    tiles = around.plan.tiles
    outcome = Waves.FRUITLESS
    for start in range(0, len(tiles), request.wave_files):
        wave = tiles[start : start + request.wave_files]
        later = [one.tile for one in tiles[start + len(wave) :] if one.is_promised]
        if not ledger.promise([one.tile for one in wave], [*later, *around.plan.blocked]):
            return outcome
        results = run(f"export {request.topic}", wave, partial(export_tile, task))
        counted = ledger.commit(results)
        if counted is None:
            logger.info("another exporter committed first", extra={"topic": request.topic})
            return outcome
        for result in counted:
            _note(found, result)
        if counted or any(result.stopped_at is not None for result in results):
            outcome = Waves.SOME
        for result in results:
            _note_stop(found, stops, result)
        if len(counted) < len(results):
            return outcome
    return Waves.DONE


async def _plan(
    options: ReadOptions,
    request: ExportRequest,
    ledger: ExportLedger,
    ends: Mapping[int, int],
    stops: Mapping[int, int],
) -> _Round:
    async with open_log(options) as log:
        partitions = {one.partition: one for one in await log.partitions()}
        bounds = {one.partition: each for one, each in (await log.bounds(list(partitions.values()))).items()}
        topic_id = next(iter(partitions.values())).topic_id
        ends = ends or {partition: each.end for partition, each in bounds.items()}
        # On a thread, because the ledger's calls may run on this event loop.
        epochs = {partition: each.leader_epoch for partition, each in bounds.items() if each.leader_epoch >= 0}
        exported = await asyncio.to_thread(ledger.load, topic_id, epochs)
        await check_history(log.confirms, partitions, exported)
        plan = plan_export(
            exported,
            # The log of a new leader may end earlier than the log did when the run began. The rest is for a later run.
            {
                partition: (bounds[partition].log_start, min(end, bounds[partition].end))
                for partition, end in ends.items()
                if partition in bounds
            },
            stops,
            lambda partition, first, end: log.ranges(partitions[partition], bounds[partition], first, end),
            request.file_bytes,
        )
        return _Round(topic_id, log.cluster_id, ends, plan)


async def check_history(confirms: Confirms, partitions: Mapping[int, TopicIdPartition], exported: Exported) -> None:
    """Raises `JobError` if a leader's log has another history than the exported records.

    `confirms` asks whether the leader's log had reached a position in its leader epoch. After an unclean election, or
    the restore of a broker, other records come in the place of the exported ones. They lie below the offset at which
    the export continues, so it would skip them."""

    async def check(number: int) -> None:
        partition, epoch = partitions[number], exported.leader_epochs[number]
        next_offset = exported.next_offsets.get(number, 0)
        if not await confirms(partition, OffsetAndEpoch(next_offset, epoch)):
            raise JobError(
                f"{partition}: records were exported up to offset {next_offset} in leader epoch {epoch}, and the"
                " leader's log has another history now: export the topic to another place"
            )

    await bounded_gather(exported.leader_epochs.keys() & partitions.keys(), check, _PARTITIONS_AT_ONCE)


def export_tile(task: ExportTask, planned: PlannedTile) -> TileResult:
    """Writes the files of one tile and stages them. A tile that cannot be read is read again before it is a stop.

    Raises errors that concern more than this tile, such as an unreachable store or target, or a missing permission."""
    result = _attempt(task, planned)
    return result if result.stopped_at is None else _attempt(task, planned)


def _attempt(task: ExportTask, planned: PlannedTile) -> TileResult:
    batches = _Batches(task, planned)
    with scratch_folder("export") as folder:
        try:
            return _staged(task, planned.tile, folder, batches)
        except (CorruptBatchError, CorruptSegmentError, BrokerError) as error:
            if isinstance(error, BrokerError) and error.code != ErrorCode.CORRUPT_MESSAGE:
                raise
            offset = max(batches.next_offset, getattr(error, "offset", 0))
            return TileResult(planned.tile, stopped_at=min(offset, planned.tile.end_offset), reason=str(error))


def _staged(task: ExportTask, tile: Tile, folder: Path, batches: _Batches) -> TileResult:
    target, schema = open_target(task.request.target), task.request.schema
    if task.table is None:
        file = folder / "tile.parquet"
        records = write_parquet(file, batches.read(), schema)
        size = file.stat().st_size
        staged = (target.stage(tile.file_name(task.topic_id), file),)
        return TileResult(tile, records, batches.dead_letters, size, lost=batches.lost, staged=staged)
    parts = write_parts(folder, batches.read(), schema, task.table.parts)
    # No other attempt has these names. What no commit names never counts, so nothing has to be compared with it.
    prefix = f"{tile.file_name(task.topic_id).removesuffix('.parquet')}-{uuid4()}"
    names = [f"{prefix}-{number}.parquet" for number in range(len(parts))]
    data_files = tuple(task.table.data_file(part, target.uri(name)) for part, name in zip(parts, names, strict=True))
    return TileResult(
        tile,
        sum(part.records for part in parts),
        batches.dead_letters,
        sum(one.file_size_in_bytes for one in data_files),
        lost=batches.lost,
        staged=tuple(target.stage(name, part.path) for part, name in zip(parts, names, strict=True)),
        data_files=data_files,
    )


class _Batches:
    """Reads the tile's records, with typed values if the request has a schema, and tracks the next offset.

    `lost` holds the ranges that were lost since the plan was made."""

    def __init__(self, task: ExportTask, planned: PlannedTile) -> None:
        self._task = task
        self._ranges = planned.ranges
        self._reader = RangeReader(task.options, task.cluster_id)
        self.next_offset = planned.tile.first_offset
        self.dead_letters = 0

    @property
    def lost(self) -> tuple[tuple[int, int], ...]:
        return tuple((one.first_offset, one.end_offset) for one in self._reader.lost)

    def read(self) -> Iterator[pa.RecordBatch]:
        values = self._task.request.values
        for batch in self._reader.read(self._ranges, self._task.request.columns):
            self.next_offset = batch.column("offset")[-1].as_py() + 1
            if values is None:
                yield batch
                continue
            typed, dead_letters = values.typed(batch)
            self.dead_letters += dead_letters
            yield typed


def _note_stop(found: dict[int, ExportedPartition], stops: dict[int, int], result: TileResult) -> None:
    partition, offset = result.tile.partition, result.stopped_at
    if offset is not None and offset < stops.get(partition, offset + 1):
        stops[partition] = offset
        found[partition] = replace(found[partition], stopped_at=offset, reason=result.reason)


def _note(found: dict[int, ExportedPartition], result: TileResult) -> None:
    one = found[result.tile.partition]
    tile = result.tile
    found[one.partition] = replace(
        one,
        first_offset=tile.first_offset if one.first_offset is None else min(one.first_offset, tile.first_offset),
        end_offset=tile.end_offset if one.end_offset is None else max(one.end_offset, tile.end_offset),
        files=one.files + 1,
        records=one.records + result.records,
        dead_letters=one.dead_letters + result.dead_letters,
        file_bytes=one.file_bytes + result.file_bytes,
        lost=tuple(dict.fromkeys((*one.lost, *result.lost))),
    )


def _note_lost(found: dict[int, ExportedPartition], plan: ExportPlan, request: ExportRequest) -> None:
    for gap in plan.gaps:
        if not request.is_loss_allowed:
            raise JobError(
                f"{gap.partition}: the offsets {gap.first_offset} to {gap.end_offset} were never exported and exist in "
                "neither tier any more; --allow-loss skips them"
            )
        one = found[gap.partition.partition]
        lost = dict.fromkeys((*one.lost, (gap.first_offset, gap.end_offset)))
        found[one.partition] = replace(one, lost=tuple(lost))


def read_options(config: PipelineConfig, request: ExportRequest) -> ReadOptions:
    return ReadOptions(
        subscription=Subscription(topics=(request.topic,)),
        starting=Position(EARLIEST),
        ending=Position(LATEST),
        tier=Tier(request.tier),
        access=Access.DIRECT,
        config=config,
        kafka=config.upstream,
        is_committed_only=request.is_committed_only,
        include_headers=request.include_headers,
        columns=(),
        min_partitions=None,
        max_records_per_partition=None,
        max_offsets_per_trigger=None,
        min_offsets_per_trigger=None,
        max_trigger_delay_ms=0,
        fail_on_data_loss=not request.is_loss_allowed,
        poll_timeout_ms=TIMEOUT_MS,
        split_bytes=DEFAULT_SPLIT_BYTES,
    )
