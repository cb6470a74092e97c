"""Records that end the freshness of a follower: of a later release, in another place, or of an unfinished rebuild."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.tiers.following import TOPIC, Cluster, Following, finished, opened
from tests.support.tiers.metadata_state import (
    NEIGHBOUR,
    NOW_MS,
    PARTITION,
    Topic,
    cut,
    gap,
    log_start,
    open_state,
    segment,
    to,
    user,
)
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.records import serde
from tiers.metadata.records.serde import (
    LOG_GAP_API_KEY,
    KeyAndValue,
    RecordType,
    check_writable,
    key_and_value,
    key_of,
    known_record_types,
    log_gap_key,
    tombstone,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentState as State
from tiers.model.segment_metadata import TopicDeletionUpdate, UnfinishedRebuildUpdate
from tiers.upkeep.importing import as_a_whole

LATER = "metadata partition 0 has records of a later release from offset 2 on: upgrade this process"


@contextmanager
def an_earlier_release(api_key: int = LOG_GAP_API_KEY) -> Iterator[None]:
    """A member that does not know these records."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serde, "_READ", {known: read for known, read in serde._READ.items() if known != api_key})
        assert RecordType(api_key, 0) not in known_record_types()
        yield


async def is_stopped(following: Following) -> None:
    for _ in range(2):
        await following.poll()
        assert LATER in str(following.follower.trouble)
        assert following.follower.trouble_of_all is None
        assert following.follower.fresh_at_ms(0) is None, "and so it owns nothing there"
        with pytest.raises(RemoteLogMetadataNotReadyError, match="upgrade this process"):
            await following.follower.ensure_fresh(0, 60_000, 50)
    assert following.follower.position(0) == 2
    assert following.state.next_offset(0) == 2
    assert [each.start_offset for each in following.state.list_remote_log_segments(PARTITION)] == [0]
    assert following.follower.oldest_age_ms() is None


@pytest.mark.parametrize("is_kept", [True, False])
async def test_an_upgraded_process_sees_what_it_had_not_understood(
    cluster: Cluster, tmp_path: Path, is_kept: bool
) -> None:
    cluster.logs = {0: [*finished(1, 0), gap(10, 20), *finished(2, 20)], 1: [log_start("a", user(5))]}
    with an_earlier_release():
        for _ in range(2):
            with opened(cluster, tmp_path, is_kept=False) as before:
                await is_stopped(before)
                assert before.follower.is_fresh(1, 60_000)
                assert before.state.gaps(PARTITION) == []
    with opened(cluster, tmp_path, is_kept=is_kept) as after:
        # A state that a release kept which reads other records is read anew; as it is, it goes on in front of them.
        assert after.state.next_offset(0) == (2 if is_kept else 0)
        assert await after.poll()
        assert after.follower.trouble is None
        assert after.follower.is_fresh(0, 60_000)
        assert after.state.gaps(PARTITION) == [LogGap(10, 20)]
        assert [each.start_offset for each in after.state.list_remote_log_segments(PARTITION)] == [0, 20]


async def test_records_from_before_are_not_fresh_from_then_on(cluster: Cluster, following: Following) -> None:
    cluster.logs = {0: finished(1, 0), 1: []}
    assert await following.poll()
    assert following.follower.is_fresh(0, 60_000)
    with an_earlier_release():
        cluster.logs[0] += [gap(10, 20)]
        await is_stopped(following)
    cluster.logs[0] += finished(2, 20)
    await is_stopped(following)


def test_a_state_that_a_later_release_kept_is_read_anew(tmp_path: Path) -> None:
    """It has passed what this one must stop at."""
    state = open_state(tmp_path)
    Topic(state).put(segment(1, 0, 9), gap(10, 20))
    state.mark_read_to_end({0: NOW_MS, 1: NOW_MS})
    state.close()
    state = open_state(tmp_path, is_kept=False)
    assert state.next_offset(0) == 2
    state.close()
    with an_earlier_release():
        state = open_state(tmp_path, is_kept=False)
        assert (state.next_offset(0), state.reached(0).offset) == (0, 2)
        state.close()


def test_records_that_not_all_members_read_are_not_written() -> None:
    written = key_and_value(gap(10, 20))
    deleted = key_and_value(TopicDeletionUpdate(PARTITION, "a", 0, False))
    raised = key_and_value(log_start("a", user(5)))
    check_writable([written, raised, deleted, tombstone(log_gap_key(PARTITION, 10))], known_record_types())
    others = frozenset({RecordType(1000, 0)})
    check_writable([deleted, tombstone(key_of(log_start("a", user(5))))], others)
    for refused, api_key in ((written, 1006), (raised, 1000), (tombstone(log_gap_key(PARTITION, 10)), 1006)):
        with pytest.raises(RemoteLogMetadataError, match=f"api key {api_key} yet: upgrade all proxies"):
            check_writable([deleted, refused], others)


HOME = 1


@pytest.fixture
def settled(cluster: Cluster, tmp_path: Path) -> Iterator[Following]:
    """Every user partition belongs to the second metadata partition."""
    with opened(cluster, tmp_path, lambda partition: HOME) as following:
        yield following


async def test_records_in_their_places_are_believed(cluster: Cluster, settled: Following) -> None:
    own = TopicIdPartition(TOPIC.topic_id, 0, TOPIC.name)
    cluster.logs = {0: [], HOME: finished(1, 0)}
    assert await settled.poll()
    assert settled.follower.is_fresh(0, 60_000)
    cluster.logs[0] += [key_and_value(UnfinishedRebuildUpdate(own, "a", NOW_MS))]
    assert await settled.poll(), "a record about a metadata partition is in that partition"
    assert settled.follower.trouble_of_all is None


async def test_after_a_record_in_another_place_nothing_is_believed(cluster: Cluster, settled: Following) -> None:
    """The order of the records decides which segment answers."""
    cluster.logs = {0: finished(1, 0), HOME: [cut(1, 5)]}
    for _ in range(2):
        await settled.poll()
        for number in (0, HOME):
            assert settled.follower.fresh_at_ms(number) is None
            with pytest.raises(RemoteLogMetadataNotReadyError, match="belong to metadata partition 1 of 2"):
                await settled.follower.ensure_fresh(number, 60_000, 5)
        assert "Rebuild the metadata into a new topic" in str(settled.follower.trouble_of_all)
        assert list(settled.state.list_remote_log_segments(PARTITION)) == []


OTHER = segment(7, 0, 9, partition=NEIGHBOUR)
REBUILT: dict[int, Sequence[KeyAndValue]] = {
    0: [each if isinstance(each, tuple) else key_and_value(each) for each in [*finished(1, 0), *finished(2, 10)]],
    1: [key_and_value(OTHER), key_and_value(to(OTHER, State.COPY_SEGMENT_FINISHED))],
}


def writes() -> list[tuple[int, KeyAndValue]]:
    """The records in the order in which `rebuild` writes them, each with its metadata partition."""
    announced, whole = as_a_whole(TOPIC, REBUILT, NOW_MS)
    return [(number, pair) for records in (announced, whole) for number, each in records.items() for pair in each]


async def waits_for_the_rebuild(following: Following) -> None:
    for number in (0, 1):
        assert following.follower.fresh_at_ms(number) is None, "and so the process owns nothing there"
        assert following.state.fresh_at_ms(number) is None
        with pytest.raises(RemoteLogMetadataNotReadyError, match="has not written all records"):
            await following.follower.ensure_fresh(number, 60_000, 5)
    assert "delete the topic and rebuild it again" in str(following.follower.trouble)


@pytest.mark.parametrize("count", range(1, len(writes())))
async def test_a_rebuild_that_ended_early_is_believed_by_no_process(
    cluster: Cluster, tmp_path: Path, count: int
) -> None:
    for number, pair in writes()[:count]:
        cluster.logs[number].append(pair)
    for _ in range(2):
        with opened(cluster, tmp_path) as following:
            assert await following.poll()
            await waits_for_the_rebuild(following)


async def test_a_rebuild_is_believed_from_its_end_on(cluster: Cluster, following: Following) -> None:
    for number, pair in writes():
        cluster.logs[number].append(pair)
        assert await following.poll()
        assert following.follower.is_fresh(0, 60_000) is ((number, pair) == writes()[-1])
    assert following.follower.trouble is None
    assert following.follower.is_fresh(1, 60_000)
    assert [each.start_offset for each in following.state.list_remote_log_segments(PARTITION)] == [0, 10]
    assert following.state.remote_end_offset(NEIGHBOUR) == 9
    assert set(following.state.partitions()) == {PARTITION, NEIGHBOUR}
