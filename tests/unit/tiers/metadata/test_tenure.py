"""`Tenure`: which work goes on over a rebalance, and which ends because another owner may have written in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context

import pytest

from tests.support.tiers.metadata_state import segment
from tests.support.tiers.owning import Group, group_of_one
from tiers.errors import OwnershipLostError
from tiers.metadata.records.serde import KeyAndValue, key_and_value
from tiers.metadata.tenure import Tenure, begin_in
from tiers.metadata.topic.group.tenures import AWAIT_MS

RECORD = key_and_value(segment(1, 0, 9))


def write_in(group: Group, tenure: Tenure | None, number: int = 0) -> asyncio.Task[None]:
    """Writes as a task that was begun in the tenure."""
    context = copy_context()
    context.run(begin_in, tenure)
    records: Callable[[], list[KeyAndValue]] = lambda: [RECORD]  # noqa: E731  # the type of a lambda
    return asyncio.create_task(group.owning.write(number, records, 1_000), context=context)


async def test_a_rebalance_that_reassigns_nothing_ends_no_tenure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of_one(monkeypatch) as group:
        group.assign({0, 1})
        await group.owns(0)
        tenure = group.owning.tenure(0)
        group.revoke()
        assert not group.owning.owns(0)
        assert group.owning.tenure(0) == tenure, "it is awaited"
        group.assign({0})
        assert group.owning.tenure(0) == tenure
        assert group.owning.tenure(1) is None, "another member has it"
        await group.owns(0)
        assert group.owning.tenure(0) == tenure


@pytest.mark.parametrize(("generation", "member"), [(3, "me"), (0, "me"), (2, "another id")])
async def test_a_generation_that_was_missed_ends_every_tenure(
    monkeypatch: pytest.MonkeyPatch, generation: int, member: str
) -> None:
    async with group_of_one(monkeypatch) as group:
        group.assign({0})
        await group.owns(0)
        tenure = group.owning.tenure(0)
        group.revoke()
        writing = write_in(group, tenure)
        await asyncio.sleep(0)
        group.assign({0}, generation, member)
        await group.owns(0)
        assert group.owning.tenure(0) not in (None, tenure)
        with pytest.raises(OwnershipLostError):
            await writing
        with pytest.raises(OwnershipLostError):
            await write_in(group, tenure)
        assert group.committed == []
        await write_in(group, group.owning.tenure(0))
        assert group.committed == [generation]


async def test_a_write_of_begun_work_waits_for_the_next_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of_one(monkeypatch) as group:
        group.assign({0})
        await group.owns(0)
        tenure = group.owning.tenure(0)
        group.revoke()
        writing = write_in(group, tenure)
        with pytest.raises(OwnershipLostError):
            await write_in(group, None)
        assert not writing.done()
        assert group.committed == []
        group.assign({0})
        await writing
        assert group.committed == [2]


async def test_a_commit_that_the_rebalance_overtook_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of_one(monkeypatch) as group:
        group.assign({0})
        await group.owns(0)
        group.refused_generations.add(1)
        writing = write_in(group, group.owning.tenure(0))
        while group.owning.owns(0):  # noqa: ASYNC110  # no event tells it
            await asyncio.sleep(0)
        group.revoke()
        group.assign({0})
        await writing
        assert group.committed == [2]


async def test_a_partition_that_another_member_got_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of_one(monkeypatch) as group:
        group.assign({0})
        await group.owns(0)
        tenure = group.owning.tenure(0)
        group.revoke()
        writing = write_in(group, tenure)
        group.assign({1})
        with pytest.raises(OwnershipLostError):
            await writing
        assert group.owning.tenure(0) is None


async def test_the_wait_for_the_ownership_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of_one(monkeypatch) as group:
        group.assign({0})
        await group.owns(0)
        tenure = group.owning.tenure(0)
        group.revoke()
        writing = write_in(group, tenure)
        await asyncio.sleep(0)
        group.now_ms += AWAIT_MS + 1
        with pytest.raises(OwnershipLostError):
            await writing
        assert group.owning.tenure(0) is None
        group.assign({0})
        await group.owns(0)
        assert group.owning.tenure(0) not in (None, tenure), "it is not the same one after that"


async def test_heartbeats_that_are_late_end_no_tenure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_of_one(monkeypatch) as group:
        group.assign({0})
        await group.owns(0)
        tenure = group.owning.tenure(0)
        group.now_ms += 5_000
        assert not group.owning.owns(0)
        assert group.owning.tenure(0) == tenure
        writing = write_in(group, tenure)
        await asyncio.sleep(0)
        group.beat()
        await writing
        assert group.committed == [1]


async def test_a_partition_that_was_owned_all_the_time_keeps_its_tenure(monkeypatch: pytest.MonkeyPatch) -> None:
    """The manager asked for it last before a slow answer of a broker."""
    async with group_of_one(monkeypatch) as group:
        group.assign({0})
        await group.owns(0)
        tenure = group.owning.tenure(0)
        group.now_ms += AWAIT_MS + 1
        group.beat()
        assert group.owning.tenure(0) == tenure
        await write_in(group, tenure)
        assert group.committed == [1]
