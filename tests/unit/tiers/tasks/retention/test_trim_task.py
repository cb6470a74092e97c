from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.interposed import after, before
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.errors import (
    BrokerError,
    OwnershipLostError,
    RemoteLogMetadataNotReadyError,
    RemoteStorageError,
)
from tiers.tasks.deletion.segment_deletion import delete_segment

KEEP_NOTHING = replace(POLICY, local_retention_bytes=0)


async def test_all_but_the_newest_segment_may_go(copied: Workbench) -> None:
    assert await copied.trim(KEEP_NOTHING) == 60
    assert (copied.log.trims, copied.steps) == ([60], ["trim-decided", "trimmed"])


def diverged(bench: Workbench) -> None:
    bench.log.elect_unclean(50)
    bench.log.append(batch_of(50, 10, leader_epoch=1))


def owned_by_another(bench: Workbench) -> None:
    bench.metadata.owned = False


def with_unread_settings(bench: Workbench) -> None:
    bench.metadata.fresh = False


def with_another_folder_as_store(bench: Workbench) -> None:
    shutil.rmtree(bench.folder / "remote")
    (bench.folder / "remote" / ".tmp").mkdir(parents=True)


@pytest.mark.parametrize(
    ("arrange", "error", "said"),
    [
        (diverged, RemoteLogMetadataNotReadyError, "from offset 50 on"),
        (owned_by_another, OwnershipLostError, None),
        (with_unread_settings, RemoteLogMetadataNotReadyError, None),
        (with_another_folder_as_store, RemoteStorageError, "another place"),
    ],
)
async def test_in_doubt_about_the_place_nothing_is_trimmed(
    copied: Workbench, arrange: Callable[[Workbench], None], error: type[Exception], said: str | None
) -> None:
    arrange(copied)
    with pytest.raises(error, match=said):
        await copied.trim_task.run(KEEP_NOTHING)
    assert copied.log.trims == []


async def test_a_segment_that_the_owners_reader_has_not_seen_is_not_trimmed(copied: Workbench) -> None:
    del copied.metadata.seen[copied.segments[1].segment_id]
    assert await copied.trim(KEEP_NOTHING) == 30


async def test_a_gap_in_the_remote_tier_ends_the_trim(copied: Workbench) -> None:
    await delete_segment(copied.services, copied.segments[1])
    assert await copied.trim(KEEP_NOTHING) is None


async def test_a_segment_that_the_store_lost_after_the_copy_is_not_trimmed(copied: Workbench) -> None:
    await copied.store.delete_log_segment_data(copied.segments[1])
    assert await copied.trim(KEEP_NOTHING) == 30
    with pytest.raises(RemoteStorageError, match="keep its records"):
        await copied.trim(KEEP_NOTHING)
    assert copied.log.trims == [30]


async def test_tier_settings_that_changed_since_the_policy_was_made_end_the_trim(
    copied: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while the trim is recorded: the write may wait for a takeover. A request may also delete remote records."""
    off = {"remote.storage.enable": "false", "remote.log.delete.on.disable": "true"}
    changed = {PARTITION: off}
    with monkeypatch.context() as late:
        after(late, copied.metadata, "put_local_log_start", lambda *_: copied.metadata.tier_configs.update(changed))
        assert await copied.trim(KEEP_NOTHING) is None
    assert await copied.trim(KEEP_NOTHING) is None
    assert copied.log.trims == []
    copied.metadata.tier_configs.clear()
    with monkeypatch.context() as repeated:
        before(repeated, copied.log, "delete_records", lambda *_: copied.metadata.tier_configs.update(changed))
        with pytest.raises(RemoteLogMetadataNotReadyError, match="changed meanwhile"):
            await copied.trim(KEEP_NOTHING)
    assert copied.log.trims == []
    assert await copied.trim(replace(KEEP_NOTHING, tier_settings=off)) == 60


async def test_where_a_trim_ends_is_recorded_before_it_begins(copied: Workbench) -> None:
    copied.metadata.fail_writes = OwnershipLostError("fenced")
    with pytest.raises(OwnershipLostError):
        await copied.trim(KEEP_NOTHING)
    assert copied.log.trims == []
    copied.metadata.fail_writes = None
    copied.end_after = "trim-decided"
    with pytest.raises(ProcessEnded):
        await copied.trim(KEEP_NOTHING)
    assert copied.log.trims == []
    assert copied.state.local_log_start(PARTITION) == (60, 0)


async def test_a_segment_is_trimmed_only_when_all_proxies_had_time_to_see_it(copied: Workbench) -> None:
    copied.now_ms -= 1
    assert await copied.trim(KEEP_NOTHING) is None
    copied.now_ms += 1
    assert await copied.trim(KEEP_NOTHING) == 60


@pytest.mark.parametrize(("start", "trimmed_to"), [(0, None), (45, 45), (60, 60), (95, 60)])
async def test_the_start_of_a_share_group_is_never_passed(
    copied: Workbench, start: int, trimmed_to: int | None
) -> None:
    copied.share_groups.start = start
    assert await copied.trim(KEEP_NOTHING) == trimmed_to


async def test_the_trim_names_the_leader_epoch_of_the_bounds_it_was_decided_on(
    copied: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounds = await copied.log.bounds(PARTITION, 1000)
    copied.log.leader_epoch += 1

    async def before_the_election(*_: object) -> object:
        return bounds

    monkeypatch.setattr(copied.log, "bounds", before_the_election)
    with pytest.raises(BrokerError):
        await copied.trim(KEEP_NOTHING)
    assert copied.log.trims == []
