"""An export of a log whose end was replaced, as after an unclean election."""

from __future__ import annotations

import uuid
from functools import partial

import pytest

from pipeline.export.job import check_history
from pipeline.export.plan import Exported
from pipeline.spark.job import JobError
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tiers.metadata.log_history import confirms
from tiers.model.ids import TopicIdPartition

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
