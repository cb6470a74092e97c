"""`MetadataPartitionOwnership`: which members may write, and which work goes on over a rebalance."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context

import pytest

from tests.support.tiers.metadata_state import gap, segment
from tests.support.tiers.owning import Group
from tests.support.tiers.waiting import until
from tiers.errors import OwnershipLostError, RemoteLogMetadataError
from tiers.metadata.metadata_log import Tenure, begin_in
from tiers.metadata.records.serde import LOG_GAP_API_KEY, KeyAndValue, RecordType, key_and_value, known_record_types
from tiers.metadata.topic.group.ownership import _TAKEOVERS_AT_ONCE, AWAIT_MS, CONFIRMATION_MAX_AGE_MS

RECORD, GAP = key_and_value(segment(1, 0, 9)), key_and_value(gap(10, 20))
OWN, TIER_CONFIGS = (f"tidegate-__remote_log_metadata-{name}0" for name in ("", "tier-configs-"))


def write_in(group: Group, tenure: Tenure | None) -> asyncio.Task[None]:
    """Writes as a task that was begun in the tenure."""
    context = copy_context()
    context.run(begin_in, tenure)
    records: Callable[[], list[KeyAndValue]] = lambda: [RECORD]  # noqa: E731  # the type of a lambda
    return asyncio.create_task(group.owning.write(0, records, 1_000), context=context)


async def begun(group: Group) -> Tenure | None:
    group.assign({0})
    await group.owns(0)
    return group.owning.tenure(0)


async def test_a_member_that_waited_too_long_fences_no_owner(group: Group) -> None:
    group.go_on.clear()
    group.assign(range(20))
    await until(lambda: len(group.initialized) == _TAKEOVERS_AT_ONCE)
    group.now_ms += CONFIRMATION_MAX_AGE_MS + 1
    group.go_on.set()
    await until(lambda: len(group.owning._owned) == _TAKEOVERS_AT_ONCE)
    await asyncio.sleep(0)
    assert len(group.initialized) == _TAKEOVERS_AT_ONCE
    assert group.owning.owned() == frozenset()
    writing = write_in(group, None)
    await asyncio.sleep(0)
    group.now_ms += CONFIRMATION_MAX_AGE_MS
    with pytest.raises(OwnershipLostError):
        await writing


@pytest.mark.parametrize(
    ("held_back_by", "forgotten"), [(None, None), (TIER_CONFIGS, None), (None, OWN), (None, TIER_CONFIGS)]
)
async def test_a_transaction_that_holds_back_the_reading_is_ended_and_no_other(
    group: Group, held_back_by: str | None, forgotten: str | None
) -> None:
    group.held_back_by, group.forgotten = held_back_by, forgotten
    await begun(group)
    others = [OWN, TIER_CONFIGS] if held_back_by or forgotten else []
    assert (group.initialized, group.aborted) == (others or [OWN], others)


async def test_nothing_is_owned_while_the_state_is_read_again(group: Group) -> None:
    await begun(group)
    group.fresh_at_ms = None
    assert not group.owning.owns(0)
    with pytest.raises(OwnershipLostError):
        await group.owning.write(0, list, 1_000)
    group.fresh_at_ms = 1
    assert group.owning.owns(0)


async def test_work_that_may_have_seen_a_part_of_the_records_is_dropped(group: Group) -> None:
    """The records are read from their start again, and meanwhile the state lacks some."""
    tenure = await begun(group)
    context = copy_context()
    context.run(begin_in, tenure)
    writing = write_in(group, tenure)
    group.fresh_at_ms, group.reading = None, 1
    with pytest.raises(OwnershipLostError):
        await writing
    group.fresh_at_ms = 1
    assert (group.owning.owns(0), context.run(group.owning.owns, 0)) == (True, False)
    assert group.owning.tenure(0) not in (None, tenure)
    with pytest.raises(OwnershipLostError):
        await write_in(group, tenure)
    assert group.committed == []


@pytest.mark.parametrize("is_over", [False, True])
async def test_an_owner_that_was_paused_writes_after_its_next_heartbeat(group: Group, is_over: bool) -> None:
    """Late heartbeats end no tenure."""
    tenure = await begun(group)
    group.now_ms += CONFIRMATION_MAX_AGE_MS + 1
    writing = write_in(group, None)
    await asyncio.sleep(0)
    assert (group.owning.owns(0), writing.done(), group.committed) == (False, False, [])
    assert group.owning.tenure(0) == tenure
    if is_over:
        group.revoke()
    group.beat()
    if is_over:
        with pytest.raises(OwnershipLostError):
            await writing
    else:
        await writing
        group.now_ms += AWAIT_MS + 1
        group.beat()
        assert group.owning.tenure(0) == tenure
    assert group.committed == ([] if is_over else [1])


async def test_work_without_a_tenure_does_not_write_in_a_later_generation(group: Group) -> None:
    """It waited for another write, and another member owned the partition meanwhile."""
    await begun(group)
    lock = group.owning._owned[0].lock
    await lock.acquire()
    writing = write_in(group, None)
    await asyncio.sleep(0)
    group.revoke()
    group.assign({5})
    group.revoke()
    group.assign({0})
    await group.owns(0)
    lock.release()
    with pytest.raises(OwnershipLostError):
        await writing
    assert group.committed == []


async def test_an_owner_writes_no_required_record_that_a_member_cannot_read(group: Group) -> None:
    group.assign({0}, record_types=known_record_types() - {RecordType(LOG_GAP_API_KEY, 0)})
    await group.owns(0)
    with pytest.raises(RemoteLogMetadataError, match="records of api key 1006 yet"):
        await group.owning.write(0, lambda: [RECORD, GAP], 1_000)
    assert group.owning.owns(0)
    await group.owning.write(0, lambda: [RECORD], 1_000)
    group.revoke()
    group.assign({0})
    await group.owns(0)
    await group.owning.write(0, lambda: [RECORD, GAP], 1_000)
    assert group.committed == [1, 2]


async def test_a_rebalance_that_moves_nothing_ends_no_tenure(group: Group) -> None:
    group.assign({0, 1})
    await group.owns(0)
    tenure = group.owning.tenure(0)
    group.revoke()
    assert not group.owning.owns(0)
    assert group.owning.tenure(0) == tenure, "it is awaited"
    writing = write_in(group, tenure)
    with pytest.raises(OwnershipLostError):
        await write_in(group, None)
    assert (writing.done(), group.committed) == (False, [])
    group.assign({0})
    assert group.owning.tenure(0) == tenure
    assert group.owning.tenure(1) is None, "another member has it"
    await group.owns(0)
    assert group.owning.tenure(0) == tenure
    await writing
    assert group.committed == [2]


@pytest.mark.parametrize(("generation", "member"), [(3, "me"), (0, "me"), (2, "another id")])
async def test_a_missed_generation_ends_every_tenure(group: Group, generation: int, member: str) -> None:
    tenure = await begun(group)
    group.revoke()
    writing = write_in(group, tenure)
    await asyncio.sleep(0)
    group.assign({0}, generation, member)
    await group.owns(0)
    assert group.owning.tenure(0) not in (None, tenure)
    for late in (writing, write_in(group, tenure)):
        with pytest.raises(OwnershipLostError):
            await late
    assert group.committed == []
    await write_in(group, group.owning.tenure(0))
    assert group.committed == [generation]


async def test_a_commit_that_the_rebalance_overtook_is_repeated(group: Group) -> None:
    tenure = await begun(group)
    group.refused_generations.add(1)
    writing = write_in(group, tenure)
    await until(lambda: not group.owning.owns(0))
    group.revoke()
    group.assign({0})
    await writing
    assert group.committed == [2]


async def test_the_wait_for_the_ownership_has_an_end(group: Group) -> None:
    tenure = await begun(group)
    group.revoke()
    writing = write_in(group, tenure)
    await asyncio.sleep(0)
    group.now_ms += AWAIT_MS + 1
    with pytest.raises(OwnershipLostError):
        await writing
    assert group.owning.tenure(0) is None
    assert await begun(group) not in (None, tenure)
