"""Facts go with copies or alone, and their positions show whether the metadata has lost records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.interposed import before, refuse
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench, copied
from tiers.config.topic_policy import TierWork
from tiers.config.total_retention import RETENTION_MINUTES
from tiers.errors import (
    LaterFormatError,
    MetadataLostError,
    OwnershipLostError,
    RemoteLogMetadataNotReadyError,
    RemoteResourceNotFoundError,
    RetriableRemoteStorageError,
)
from tiers.metadata.metadata_log import MetadataPosition
from tiers.metadata.partition_facts import PartitionFacts, decode_partition_facts, newest_of
from tiers.model.segment_metadata import Cut, RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import log_key, parse_facts_key
from tiers.storage.remote_storage_manager import StoredObject
from tiers.tasks.history.stored_facts import FactsTask, put_facts, read_stored_facts

DAY_MS = 24 * 3_600_000


async def alone(bench: Workbench) -> list[PartitionFacts]:
    """Returns the `.facts` objects."""
    keys = [key for key in await bench.objects() if parse_facts_key(key)]
    return [decode_partition_facts(await bench.store.get_object(key)) for key in keys]


async def of_last_copy(bench: Workbench) -> PartitionFacts:
    last = bench.segments[-1]
    return decode_partition_facts(decode_indexes_object(await bench.store.fetch_indexes(last), last).indexes.facts)


async def more(bench: Workbench, first: int) -> None:
    bench.log.append(*(batch_of(first + 10 * number, 10, value_bytes=15) for number in range(3)))
    await bench.copy_all()


async def runs(bench: Workbench, count: int) -> None:
    for _ in range(count):
        await bench.facts_task.run()


async def test_every_copy_has_the_facts_as_of_its_announcement(bench: Workbench) -> None:
    await bench.check_facts()
    await copied(bench)
    assert (await of_last_copy(bench)).is_empty
    await bench.metadata.put_log_start(PARTITION, user_log_start(5, 0))
    at = bench.metadata.log.position(PARTITION)
    await more(bench, 100)
    facts = await of_last_copy(bench)
    assert facts.log_starts == (user_log_start(5, 0),)
    assert facts.position is not None
    assert at <= facts.position


async def test_a_change_is_stored_alone_only_if_no_copy_follows(bench: Workbench) -> None:
    await runs(bench, 3)
    assert await alone(bench) == []
    await bench.check_facts()
    await copied(bench)
    await runs(bench, 3)
    assert await alone(bench) == []
    await bench.metadata.put_log_start(PARTITION, user_log_start(5, 0))
    await runs(bench, 1)
    await more(bench, 100)
    await runs(bench, 3)
    assert await alone(bench) == []
    await bench.metadata.put_log_start(PARTITION, user_log_start(7))
    await runs(bench, 3)
    [facts] = await alone(bench)
    assert facts.log_starts[-1] == user_log_start(7)
    await bench.metadata.put_log_start(PARTITION, user_log_start(9))
    await runs(bench, 2)
    assert [each.log_starts[-1].offset for each in await alone(bench)] == [9], "it contains the earlier ones"
    bench.restart()
    await bench.check_facts()
    await runs(bench, 3)
    assert len(await alone(bench)) == 1


async def test_dead_segments_are_in_the_facts_until_they_are_forgotten(bench: Workbench) -> None:
    await bench.check_facts()
    await copied(bench)
    dead = bench.segments[0]
    for state in (RemoteLogSegmentState.DELETE_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED):
        await bench.services.write_state(dead, state)
    await runs(bench, 2)
    assert [each.dead for each in await alone(bench)] == [(dead.segment_id.id,)]
    await bench.metadata.forget_deleted_segments([dead.segment_id])
    bench.restart()
    await bench.check_facts()
    await runs(bench, 2)
    assert [each.dead for each in await alone(bench)] == [()]


@pytest.mark.parametrize("is_alone", [True, False])
async def test_a_position_that_is_not_reached_shows_lost_metadata(bench: Workbench, is_alone: bool) -> None:
    """The last copy has it, or an object of its own. Copies that are made in doubt repeat it."""
    await bench.check_facts()
    await copied(bench)
    if is_alone:
        await bench.facts_task.store()
    bench.metadata.is_position_confirmed = False
    bench.restart()
    with pytest.raises(MetadataLostError, match="the metadata lost records since"):
        await bench.check_facts()
    known = (await alone(bench))[0] if is_alone else await of_last_copy(bench)
    await more(bench, 100)
    assert (await of_last_copy(bench)).position == known.position
    bench.restart()
    with pytest.raises(MetadataLostError, match="the metadata lost records since"):
        await bench.check_facts()


async def test_in_doubt_copies_repeat_facts_of_the_present_metadata_topic(bench: Workbench) -> None:
    """Facts of an earlier metadata topic, with a later position, would show no loss of the present one."""
    await bench.check_facts()
    await copied(bench)
    known = await of_last_copy(bench)
    assert known.position is not None
    earlier = known.position._replace(topic_id=UUID(int=8), next_offset=1000)
    await put_facts(bench.store, replace(known, position=earlier, settings_position=earlier))
    bench.metadata.is_position_confirmed = False
    bench.restart()
    with pytest.raises(MetadataLostError, match="the metadata lost records since"):
        await bench.check_facts()
    await more(bench, 100)
    assert (await of_last_copy(bench)).position == known.position


async def test_in_doubt_copies_repeat_those_facts_that_the_doubt_is_about(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import made the present metadata topic, without settings. A topic before the last one had later offsets."""
    present, log = UUID(int=8), bench.metadata.log
    monkeypatch.setattr(log, "position", lambda _: MetadataPosition(present, 0, bench.metadata.written))
    await bench.check_facts()
    earlier = MetadataPosition(UUID(int=7), 5, 1000)
    await put_facts(bench.store, replace(bench.facts_task.present(), position=earlier, settings_position=earlier))
    bench.restart()
    await bench.check_facts()
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", {RETENTION_MINUTES: "-1"})
    await copied(bench)
    monkeypatch.undo()
    bench.metadata.tier_configs.clear()
    for first in (100, 130):
        with pytest.raises(MetadataLostError, match="the metadata lost records since"):
            await bench.check_facts()
        await more(bench, first)
        assert (await of_last_copy(bench)).tier_config == {RETENTION_MINUTES: "-1"}


async def test_a_copy_of_a_later_release_proves_nothing(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.check_facts()
    await copied(bench)
    last = bench.segments[-1].segment_id
    refuse(
        monkeypatch, bench.store, "fetch_indexes", LaterFormatError("version 4"), lambda each: each.segment_id == last
    )
    bench.restart()
    with pytest.raises(MetadataLostError, match="not known whether the metadata lost records"):
        await bench.check_facts()


async def test_a_copy_below_void_ones_carries_no_facts(bench: Workbench) -> None:
    """A look reads the last copy by offset, so the owner stores the facts as an object of their own."""
    await bench.check_facts()
    await copied(bench)
    bench.log.elect_unclean(50)
    bench.log.append(*(batch_of(at, 10, value_bytes=15, leader_epoch=1) for at in range(50, 80, 10)))
    await bench.copy()
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", {RETENTION_MINUTES: "-1"})
    await bench.copy(replace(POLICY, segment_ms=0))
    assert bench.finished == [(0, 29), (30, 59), (50, 79), (60, 89)]
    await runs(bench, 3)
    assert [each.tier_config for each in await alone(bench)] == [{RETENTION_MINUTES: "-1"}]


async def test_many_copies_before_the_first_look_hide_no_lost_metadata(bench: Workbench) -> None:
    """They name no position, because the owner has not compared the metadata with the store."""
    await bench.check_facts()
    await copied(bench)
    bench.metadata.is_position_confirmed = False
    bench.restart()
    for number in range(20):
        await more(bench, 100 + 30 * number)
    assert (await of_last_copy(bench)).position is None
    with pytest.raises(MetadataLostError, match="the metadata lost records since"):
        await bench.check_facts()


@pytest.mark.parametrize("name", ["fetch_indexes", "fetch_log_segment"])
async def test_an_object_that_is_listed_and_not_found_is_not_known(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """It proves no metadata, and no gap is recorded where it lies."""
    await bench.check_facts()
    await copied(bench)
    del bench.metadata.segments[bench.segments[-1].segment_id]
    refuse(monkeypatch, bench.store, name, RemoteResourceNotFoundError("404"))
    bench.restart()
    with pytest.raises(RetriableRemoteStorageError, match="lists an object and does not find it"):
        await bench.check_facts()
    monkeypatch.undo()
    with pytest.raises(MetadataLostError, match="which the metadata does not know"):
        await bench.check_facts()


async def test_facts_that_are_listed_and_not_found_are_not_known(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.check_facts()
    await bench.facts_task.store()
    get_object = bench.store.get_object

    async def get(key: str) -> bytes:
        if key.endswith(".facts"):
            raise RemoteResourceNotFoundError("404")
        return await get_object(key)

    monkeypatch.setattr(bench.store, "get_object", get)
    bench.restart()
    with pytest.raises(RetriableRemoteStorageError, match="lists an object and does not find it"):
        await bench.check_facts()
    monkeypatch.undo()
    await bench.check_facts()


async def test_a_listed_object_of_a_dead_segment_may_be_gone(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing may be stale for ever."""
    await bench.check_facts()
    await copied(bench)
    dead, listed = bench.segments[-1], [each async for each in bench.store.list_objects("")]
    for state in (RemoteLogSegmentState.DELETE_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED):
        await bench.services.write_state(dead, state)
    await bench.store.delete_log_segment_data(dead)
    await runs(bench, 4)
    list_objects = bench.store.list_objects

    async def stale(prefix: str) -> AsyncIterator[StoredObject]:
        async for each in list_objects(prefix):
            yield each
        for each in listed:
            if str(dead.segment_id.id) in each.key:
                yield each

    monkeypatch.setattr(bench.store, "list_objects", stale)
    bench.restart()
    await bench.check_facts()
    assert bench.facts_task.is_proved


@pytest.mark.parametrize("lost", [0, 1, 2])
async def test_a_whole_unknown_segment_shows_a_loss(bench: Workbench, lost: int) -> None:
    await copied(bench)
    segment = bench.segments[lost]
    del bench.metadata.segments[segment.segment_id]
    with pytest.raises(MetadataLostError, match="which the metadata does not know"):
        await bench.check_facts()
    (bench.folder / "remote" / log_key("cluster", segment)).unlink()
    await bench.check_facts()


@pytest.mark.parametrize("damage", [b"facts 2 00000000\n{}", b"facts 1"])
async def test_facts_that_cannot_be_read_prove_nothing(bench: Workbench, damage: bytes) -> None:
    await copied(bench)
    await bench.record_log_start(5)
    await runs(bench, 2)
    [path] = (bench.folder / "remote").rglob("*.facts")
    path.write_bytes(damage)
    bench.restart()
    with pytest.raises(MetadataLostError, match="not known whether the metadata lost records"):
        await bench.check_facts()
    await bench.record_log_start(6)
    await bench.facts_task.store()
    assert await bench.accept() == []


async def test_facts_that_an_owner_replaces_during_the_look_are_read(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await copied(bench)
    await bench.check_facts()
    await bench.record_log_start(5)
    await bench.facts_task.store()
    owner = bench.facts_task

    async def replace_facts(key: str) -> None:
        if key.endswith(".facts"):
            monkeypatch.undo()
            await bench.record_log_start(6)
            await owner.store()

    before(monkeypatch, bench.store, "get_object", replace_facts)
    found = await read_stored_facts(bench.store, "cluster", PARTITION)
    assert [start.offset for each in found.objects.values() for start in each.log_starts] == [6]


async def test_a_change_that_is_taken_back_is_stored_once_more(bench: Workbench) -> None:
    """Otherwise a metadata topic that loses the last change reaches the position of the first one."""

    async def position_of(paused: str | None, rounds: int) -> MetadataPosition | None:
        config = {TierWork.EXPIRING.key: paused}
        await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", config)
        await runs(bench, rounds)
        newest = newest_of(await alone(bench))
        return None if newest is None else newest.position

    await copied(bench)
    await bench.check_facts()
    first = await position_of("true", 2)
    assert await position_of(None, 1) == first
    last = await position_of("true", 2)
    assert first is not None
    assert last is not None
    assert last > first


@pytest.mark.parametrize(
    ("lacking", "record"),
    [
        (
            {"tier_config": {RETENTION_MINUTES: "9"}},
            lambda to: to.change_topic_tier_config(PARTITION.topic_id, "orders", {RETENTION_MINUTES: "9"}),
        ),
        ({"cuts": (Cut(7, 500, 0),)}, lambda to: to.put_cut(PARTITION, 7, 500)),
        ({"log_starts": (user_log_start(5),)}, lambda to: to.put_log_start(PARTITION, user_log_start(5, 0))),
    ],
    ids=["settings", "cut", "log start"],
)
async def test_positions_of_another_topic_count_for_what_an_import_lacks(
    bench: Workbench, lacking: dict[str, Any], record: Callable[[Any], Awaitable[None]]
) -> None:
    """Otherwise records would expire too early, or deleted and replaced ones would come back."""
    await copied(bench)
    await bench.check_facts()
    old = bench.facts_task.present()
    assert old.position is not None
    at = old.position._replace(topic_id=UUID(int=8))
    old = replace(old, position=at, settings_position=at)
    await put_facts(bench.store, old)
    bench.restart()
    await bench.check_facts()
    await put_facts(bench.store, replace(old, position=at._replace(leader_epoch=9), **lacking))
    for segment in bench.segments:  # no copy names the present topic
        await bench.store.delete_log_segment_data(segment)
    bench.restart()
    with pytest.raises(MetadataLostError, match="lacks the settings"):
        await bench.check_facts()
    await record(bench.metadata)
    await bench.check_facts()


async def test_only_an_owner_that_has_read_all_compares_and_stores_facts(bench: Workbench) -> None:
    """To a former owner, the copies of the present one are unknown."""
    await copied(bench)
    bench.metadata.fresh = False
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await bench.check_facts()
    bench.metadata.fresh, bench.metadata.owned = True, False
    with pytest.raises(OwnershipLostError):
        await bench.check_facts()
    with pytest.raises(OwnershipLostError):
        await bench.facts_task.store()
    assert (bench.facts_task.is_proved, await alone(bench)) == (False, [])


def state(task: FactsTask) -> tuple[bool, bool]:
    return task.is_proved, task.is_check_due


async def test_the_comparison_is_repeated_after_a_day_and_in_doubt(bench: Workbench) -> None:
    await copied(bench)
    task = FactsTask(bench.services, PARTITION)
    assert state(task) == (False, True)
    await task.check()
    assert state(task) == (True, False)
    bench.now_ms += DAY_MS
    assert state(task) == (False, True)
    lost = bench.segments[-1]
    del bench.metadata.segments[lost.segment_id]
    waited, doubts = [], []
    for _ in range(8):
        await task.check()
        doubts.append(task.doubt)
        began_ms = bench.now_ms
        while not task.is_check_due:
            bench.now_ms += 60_000
        waited.append((bench.now_ms - began_ms) // 60_000)
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]
    assert all(isinstance(each, MetadataLostError) for each in doubts)
    assert await bench.accept() == []
    await task.check()
    assert (task.doubt, task.is_proved) == (None, True)


async def test_what_an_operator_accepts_counts_from_then_on(bench: Workbench) -> None:
    """Later facts name the accepted position again, so the object of the acceptance may go."""
    await bench.check_facts()
    await copied(bench)
    await bench.facts_task.store()
    bench.metadata.is_position_confirmed = False
    bench.restart()
    with pytest.raises(MetadataLostError):
        await bench.check_facts()
    assert await bench.accept() == []
    bench.metadata.is_position_confirmed = True
    await bench.check_facts()
    await more(bench, 100)
    accepted = (await of_last_copy(bench)).accepted
    assert len(accepted) == 2
    bench.metadata.is_position_confirmed = False
    stored = await read_stored_facts(bench.store, "cluster", PARTITION)
    assert {each.accepted for each in stored.not_accepted()} == {accepted}
