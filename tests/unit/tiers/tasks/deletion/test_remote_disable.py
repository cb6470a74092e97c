"""Remote data of a topic is deleted when the topic is disabled with that option, and only then."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.interposed import after, before, refuse
from tests.support.tiers.topic_deletion_bench import rebuilt
from tests.support.tiers.workbench import PARTITION, ProcessEnded, Workbench
from tiers.config.topic_policy import TierWork
from tiers.config.topic_settings import DELETE_ON_DISABLE, REMOTE_STORAGE_ENABLE
from tiers.errors import (
    MetadataLostError,
    RemoteLogError,
    RemoteLogMetadataError,
    RemoteLogMetadataNotReadyError,
)
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch
from tiers.storage.object_key import parse_facts_key
from tiers.tasks.deletion.remote_disable import delete_disabled

DISABLED = {REMOTE_STORAGE_ENABLE: "false", DELETE_ON_DISABLE: "true"}
ENABLED_AGAIN = {REMOTE_STORAGE_ENABLE: "true", DELETE_ON_DISABLE: "false"}


def idle(partition: TopicIdPartition) -> bool:
    return False


async def test_a_disabled_topic_leaves_nothing_in_the_store(copied: Workbench) -> None:
    assert await delete_disabled(copied.services, idle) == 0
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    assert await delete_disabled(copied.services, lambda partition: partition == PARTITION) == 0
    assert len(copied.finished) == 3
    assert await delete_disabled(copied.services, idle) == 3
    assert [parse_facts_key(key) is not None for key in await copied.objects()] == [True]
    assert copied.segments == []
    assert copied.steps[0] == "log-start-raised"
    assert copied.state.log_start_offset(PARTITION) == 0
    assert await delete_disabled(copied.services, idle) == 0


async def test_the_log_start_names_the_epoch_of_the_last_remote_record(bench: Workbench) -> None:
    """Otherwise, a leader that was cut off in epoch 3 could lose its own records when the topic is tiered again."""
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, leader_epoch=3 if n < 4 else 5) for n in range(10)])
    bench.log.leader_epoch = 6
    await bench.copy_all()
    bench.log.log_start_offset = 60
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    assert await delete_disabled(bench.services, idle) == 3
    assert bench.state.log_starts(PARTITION) == [user_log_start(60, leader_epoch=6, last_epoch=5)]


async def test_an_open_plan_goes_with_its_announced_segments(copied: Workbench) -> None:
    """The offload died. Without this deletion, a process that reads the topic anew would find its segments begun."""
    await copied.metadata.put_copy_plan(CopyPlan(PARTITION, "", 0, UUID(int=7), 1, 0, 0, (90, 95, 100)))
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    assert await delete_disabled(copied.services, idle) == 5
    assert await delete_disabled(copied.services, idle) == 0
    assert copied.state.copy_plans(PARTITION) == []


@pytest.mark.parametrize(
    "config",
    [
        {REMOTE_STORAGE_ENABLE: "false"},
        {REMOTE_STORAGE_ENABLE: "true", DELETE_ON_DISABLE: "true"},
        {REMOTE_STORAGE_ENABLE: "false", DELETE_ON_DISABLE: "false"},
        {DELETE_ON_DISABLE: "true"},  # and the topic is not in the settings file any more
        {**DISABLED, TierWork.EXPIRING.key: "true"},
    ],
)
async def test_nothing_else_deletes(copied: Workbench, config: dict[str, str]) -> None:
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", config)
    assert await delete_disabled(copied.services, idle) == 0
    assert len(copied.finished) == 3


@pytest.mark.parametrize(
    ("meanwhile", "left"),
    [
        ("the settings are read", [(0, 29), (30, 59), (60, 89)]),
        ("the log start is written", [(0, 29), (30, 59), (60, 89)]),
        ("the log start was written", [(0, 29), (30, 59), (60, 89)]),
        ("a segment is deleted", [(0, 29), (30, 59)]),
    ],
)
async def test_a_request_that_is_taken_back_meanwhile_ends_the_deletion(
    copied: Workbench, monkeypatch: pytest.MonkeyPatch, meanwhile: str, left: list[tuple[int, int]]
) -> None:
    """Segments go one after the other from the end, and the owner copies their records again.

    A hole before the remaining segments would end the trimming, and the broker's own retention would remove records
    that nobody has copied."""
    metadata = copied.metadata
    await metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    places: dict[str, tuple[object, str]] = {
        "the settings are read": (metadata.log, "ensure_fresh"),
        "the log start is written": (metadata, "put_log_start"),
        "the log start was written": (metadata, "put_log_start"),
        "a segment is deleted": (copied.store, "delete_log_segment_data"),
    }

    def request(*arguments: Any) -> None:
        if meanwhile != "the settings are read" or arguments[1] == 0:  # to their end
            metadata.tier_configs[PARTITION] = ENABLED_AGAIN

    with monkeypatch.context() as patched:
        (after if meanwhile == "the log start was written" else before)(patched, *places[meanwhile], request)
        with pytest.raises(RemoteLogError, match="tiered again"):
            await delete_disabled(copied.services, idle)
    assert (copied.finished, bool(metadata.state.log_starts(PARTITION))) == (left, len(left) < 3)
    copied.restart()
    await copied.copy_all()
    assert copied.finished == [(0, 29), (30, 59), (60, 89)]
    assert await copied.remote_bytes() == copied.log.bytes_of(0, 89)


async def test_a_request_that_is_taken_back_ends_no_earlier_log_start_or_trim(
    copied: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, earlier, trim = copied.metadata, user_log_start(5, leader_epoch=0), OffsetAndEpoch(30, 0)
    copied.log.log_start_offset = 30
    await metadata.put_log_start(PARTITION, earlier)
    await metadata.put_local_log_start(PARTITION, trim)
    await metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)

    def take_back(*_: object) -> None:
        metadata.tier_configs[PARTITION] = ENABLED_AGAIN

    with monkeypatch.context() as patched:
        after(patched, metadata, "put_log_start", take_back)
        with pytest.raises(RemoteLogError, match="tiered again"):
            await delete_disabled(copied.services, idle)
    assert copied.state.log_starts(PARTITION) == [earlier]
    assert copied.state.local_log_start(PARTITION) == trim
    assert len(copied.finished) == 3


async def test_a_segment_that_only_the_store_knows_stops_the_deletion(copied: Workbench) -> None:
    """Metadata was lost. So the request to delete may be one that the user has taken back since."""
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    del copied.metadata.segments[copied.segments[-1].segment_id]
    objects = await copied.objects()
    with pytest.raises(MetadataLostError, match="which the metadata does not know"):
        await delete_disabled(copied.services, idle)
    assert await copied.objects() == objects
    assert copied.state.log_starts(PARTITION) == []


async def test_rebuild_brings_none_of_it_back(copied: Workbench) -> None:
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    copied.end_after = "delete-started-written"
    with pytest.raises(ProcessEnded):
        await delete_disabled(copied.services, idle)
    plan = await rebuilt(copied)
    assert plan is not None
    assert (plan.segments, plan.refused, len(plan.dropped)) == ([], [], 3)


async def test_a_store_that_fails_is_left_alone_until_the_next_round(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(20)])
    await bench.copy_all()
    assert len(bench.finished) == 6
    asked = refuse(monkeypatch, bench.store, "delete_log_segment_data")
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    assert await delete_disabled(bench.services, idle) == 0
    assert [each.start_offset for each in asked] == [150, 120, 90]
    assert await delete_disabled(bench.services, idle) == 0
    assert [each.start_offset for each in asked] == [150, 120, 90, 60, 30, 0]


async def test_only_the_owner_deletes_and_a_failure_is_tried_again(copied: Workbench) -> None:
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    copied.metadata.owned = False
    assert await delete_disabled(copied.services, idle) == 0
    copied.metadata.owned = True
    copied.metadata.fail_writes = RemoteLogMetadataError("not now")
    with pytest.raises(RemoteLogMetadataError, match="not now"):
        await delete_disabled(copied.services, idle)
    assert len(copied.finished) == 3
    copied.metadata.fail_writes = None
    assert await delete_disabled(copied.services, idle) == 3


@pytest.mark.parametrize("left", [3, 2])
async def test_the_deletion_ends_while_the_metadata_cannot_be_read(
    copied: Workbench, monkeypatch: pytest.MonkeyPatch, left: int
) -> None:
    """The metadata of the partition before, or the settings while the segments go one after the other."""
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)

    def behind(partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        if max_age_ms:
            raise RemoteLogMetadataNotReadyError("behind")

    if left == 3:
        before(monkeypatch, copied.metadata.log, "ensure_fresh", behind)
    before(monkeypatch, copied.store, "delete_log_segment_data", lambda _: setattr(copied.metadata, "fresh", False))
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await delete_disabled(copied.services, idle)
    assert len(copied.finished) == left


async def test_a_request_that_came_back_with_lost_metadata_deletes_nothing(copied: Workbench) -> None:
    """The user has enabled tiering again since, and the metadata has lost the record of that."""
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", ENABLED_AGAIN)
    await copied.check_facts()
    await copied.facts_task.store()
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", DISABLED)
    copied.metadata.is_position_confirmed = False
    with pytest.raises(MetadataLostError, match="lost records since"):
        await delete_disabled(copied.services, idle)
    assert len(copied.finished) == 3
    assert copied.state.log_starts(PARTITION) == []
