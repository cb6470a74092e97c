"""Exports of a log whose end was replaced, as after an unclean election."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import PipelineConfig
from pipeline.export import job
from pipeline.export.job import ExportRequest, check_history, export_by
from pipeline.export.ledger import TileResult
from pipeline.export.plan import Exported, PlannedTile
from pipeline.export.target import TargetSettings
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.pipeline.log_exports import PARTITION, KilledError, OneLog, TableExport, run, run_killed
from tiers.metadata.log_history import confirms
from tiers.upkeep.runner import JobError

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


@pytest.fixture
def log() -> InMemoryLog:
    return InMemoryLog()


@pytest.fixture
def table(tmp_path: Path, log: InMemoryLog, monkeypatch: pytest.MonkeyPatch) -> TableExport:
    return TableExport(tmp_path, log, monkeypatch)


def test_files_of_a_killed_run_never_count(table: TableExport, log: InMemoryLog) -> None:
    log.append(batch_of(0, 3, timestamp=1_000))
    table.run()
    log.append(batch_of(3, 3, timestamp=2_000))
    with pytest.raises(KilledError):
        table.run(run_killed)
    log.elect_unclean(3)
    log.append(batch_of(3, 3, timestamp=3_000, leader_epoch=1))
    table.run()
    assert table.times_ms() == [1_000, 1_001, 1_002, 3_000, 3_001, 3_002]


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
