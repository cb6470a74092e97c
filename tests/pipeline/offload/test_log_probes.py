"""Probes ask the log for the ends of batches. Any offset of a damaged batch finds the damage."""

from __future__ import annotations

import asyncio
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.offload.log_probes import DamagedLogError, end_of_batch, first_damaged
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.in_memory_log import DamagedLog
from tests.support.fakes.record_batches import batch_of
from tiers.model.ids import TopicIdPartition

PARTITION = TopicIdPartition(UUID(int=3), 0, "orders")
TIMEOUT_MS = 1_000
batch_sizes = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=20)


def log_of(counts: list[tuple[int, int]]) -> DamagedLog:
    log, offset = DamagedLog(), 0
    for hole, count in counts:
        log.append(batch_of(offset + hole, count))
        offset += hole + count
    return log


@given(batch_sizes, st.data())
def test_an_end_is_that_of_the_batch_there_or_of_the_next(counts: list[tuple[int, int]], data: st.DataObject) -> None:
    log = log_of(counts)
    offset = data.draw(st.integers(0, log.end_offset - 1))
    end = asyncio.run(end_of_batch(log, PARTITION, offset, TIMEOUT_MS))
    assert end == min(one.next_offset for one in iterate_batches(log.records) if one.next_offset > offset)
    assert asyncio.run(end_of_batch(log, PARTITION, log.end_offset, TIMEOUT_MS)) is None


@given(batch_sizes, st.data())
def test_a_damaged_batch_is_found_by_an_offset_in_it(counts: list[tuple[int, int]], data: st.DataObject) -> None:
    log = log_of(counts)
    batches = list(iterate_batches(log.records))
    place = data.draw(st.integers(0, len(batches) - 1))
    log.damaged_offset = batches[place].base_offset
    good = data.draw(st.sampled_from([0, *(one.next_offset for one in batches[:place])]))

    async def find() -> DamagedLogError:
        with pytest.raises(DamagedLogError) as seen:
            await end_of_batch(log, PARTITION, batches[place].last_offset, TIMEOUT_MS)
        return await first_damaged(log, PARTITION, good, seen.value, TIMEOUT_MS)

    found = asyncio.run(find())
    assert found.offset <= log.damaged_offset  # in the hole before it, if there is one: nothing is between
    assert not any(found.offset <= one.last_offset < log.damaged_offset for one in batches)
