"""Every client passes a gap at the end of a log: its position reaches the end, and it reads new records."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from protocol.primitives import Buffer
from protocol.records.gap_batch import gap_batch
from tests.support.clients.all_clients import POSITIONED, READERS
from tests.support.clients.client import READ_COMMITTED, READ_UNCOMMITTED
from tests.support.rigs.gap_stage import LEADER_EPOCH, Fetched, GapStage, gap_stage
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import produce

pytestmark = pytest.mark.integration

COUNT = 20
END = 120
"""The end (exclusive) of the gap, which begins at `COUNT`."""

ISOLATIONS = (READ_UNCOMMITTED, READ_COMMITTED)


def answer(fetched: Fetched) -> Buffer:
    return gap_batch(fetched.version, fetched.offset, END, LEADER_EPOCH)


def assert_passed_by_one_answer(stage: GapStage, offset: int) -> None:
    """Checks that one answer took the client across the gap. A client repeats a Fetch when its connection closes."""
    assert set(stage.in_gap) == {offset}
    assert len(stage.in_gap) <= 2


@pytest.mark.parametrize("name", READERS)
async def test_it_reads_what_comes_behind_the_gap(kafka: KafkaCluster, topic_name: str, name: str) -> None:
    async with gap_stage(kafka, topic_name, COUNT, END - COUNT, answer) as stage:
        later = [f"{topic_name}:{n}".encode() for n in (END, END + 1)]
        count = COUNT + len(later)
        read = READERS[name].read
        async with asyncio.TaskGroup() as group:
            reading = group.create_task(asyncio.to_thread(read, stage.bootstrap, topic_name, 0, count, READ_COMMITTED))
            await stage.until_fetched(END)
            await asyncio.to_thread(produce, kafka.bootstrap_servers, topic_name, later)
        found = [(record.offset, record.value) for record in reading.result()]
        assert found == [*enumerate(stage.values), *enumerate(later, END)]
        assert_passed_by_one_answer(stage, COUNT)


@pytest.mark.parametrize("name", POSITIONED)
async def test_its_position_reaches_the_end(kafka: KafkaCluster, topic_name: str, name: str) -> None:
    async with gap_stage(kafka, topic_name, COUNT, END - COUNT, answer) as stage:
        read_to = POSITIONED[name].read_to
        for isolation, offset in itertools.product(ISOLATIONS, (0, COUNT + 7)):
            stage.fetches.clear()
            found = await asyncio.to_thread(read_to, stage.bootstrap, topic_name, offset, END, isolation)
            assert [(record.offset, record.value) for record in found] == [*enumerate(stage.values)][offset:]
            assert_passed_by_one_answer(stage, max(offset, COUNT))
