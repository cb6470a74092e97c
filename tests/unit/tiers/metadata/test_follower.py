"""`MetadataFollower` over scripted answers: what makes it fresh, and what it reports with a full disk or a bug."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import lmdb
import pytest
from kafka.protocol.consumer import ListOffsetsRequest

from protocol.errors import ErrorCode
from tests.support.simulation.loop import VirtualLoop
from tests.support.tiers.following import NODE, TOPIC, Cluster, Following, finished
from tests.support.tiers.metadata_state import NOW_MS, open_state, segment, to
from tests.support.tiers.waiting import until
from tiers.access.open_tier import read_all
from tiers.broker.client import Leader
from tiers.broker.fetch import FetchedPartition
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import key_of
from tiers.metadata.state import writer as writer_module
from tiers.metadata.state.layout import Databases, delete_prefix
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.topic import follower as follower_module
from tiers.metadata.topic.followed_state import Answer
from tiers.metadata.topic.follower import MetadataFollower
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_start import OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentState as State


async def test_after_a_loss_of_records_the_state_is_kept_and_is_not_fresh(
    cluster: Cluster, following: Following
) -> None:
    cluster.logs = {0: finished(1, 0), 1: finished(2, 100)}
    assert await following.poll()
    assert following.follower.events_read == 4
    lost, records = segment(2, 100, 109).topic_id_partition, cluster.logs[1]
    for left in ([], records[:1]):
        # Partition 1 lost records; partition 0 goes on.
        cluster.logs[0] += finished(3, 10)
        cluster.logs[1] = left
        assert not await following.poll()
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await following.follower.ensure_fresh(1, 60_000, 50)
        assert not following.follower.is_fresh(1, 60_000)
        assert f"metadata partition 1 ends at {len(left)} and was read to 2" in str(following.follower.trouble)
        assert following.follower.is_fresh(0, 60_000)
        assert following.follower.trouble_of_all is None, "the owner of partition 0 goes on"
        assert following.follower.position(0) == len(cluster.logs[0])
        assert following.state.remote_end_offset(lost) == 109
    cluster.logs[1] = records
    assert await following.poll()
    assert following.follower.trouble is None
    assert following.follower.is_fresh(1, 60_000)
    assert following.state.diverged() == {}


async def test_records_read_while_the_end_is_asked_for_are_no_loss(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.logs[0] = finished(1, 0)
    assert await following.poll()
    answered = cluster.request

    async def overtaken(node_id: int, message: Any, timeout_ms: int, *, min_version: int) -> Any:
        answer = await answered(node_id, message, timeout_ms, min_version=min_version)
        if isinstance(message, ListOffsetsRequest):
            cluster.logs[0] += finished(2, 100)
            await following.poll()
        return answer

    monkeypatch.setattr(cluster, "request", overtaken)
    await following.follower.ensure_fresh(0, 0, 60_000)
    assert following.follower.trouble is None


async def test_a_new_leaders_first_answers_are_neither_loss_nor_fresh(cluster: Cluster, following: Following) -> None:
    """Its high watermark may lie below what was committed before it."""
    cluster.logs[0] = finished(1, 0)
    assert await following.poll()
    known_ms = following.follower.fresh_at_ms(0)
    cluster.leaders[NODE] = Leader(NODE, 5)
    cluster.error_of_latest = ErrorCode.OFFSET_NOT_AVAILABLE
    cluster.high_watermark = 1
    assert not await following.poll()
    assert (following.follower.trouble, following.follower.fresh_at_ms(0)) == (None, known_ms)
    cluster.error_of_latest, cluster.high_watermark = ErrorCode.NONE, None
    assert await following.poll()
    assert following.follower.fresh_at_ms(0) != known_ms


async def test_records_that_were_deleted_unread_are_never_taken_for_read(
    cluster: Cluster, following: Following
) -> None:
    cluster.logs = {0: finished(1, 0) + finished(2, 10), 1: []}
    cluster.log_start = 2
    assert not await following.poll()
    assert not await following.poll()
    assert following.follower.position(0) == 0
    assert "records 0 to 1 of metadata partition 0 were deleted unread" in str(following.follower.trouble)
    assert not following.follower.is_fresh(0, 60_000)
    assert following.state.fresh_at_ms(0) is None
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await following.follower.ensure_fresh(0, 60_000, 50)
    cluster.log_start = 0
    assert await following.poll()
    assert following.follower.trouble is None
    assert following.follower.is_fresh(0, 60_000)


async def test_nothing_is_fresh_while_the_state_is_emptied(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.logs[0] = finished(1, 0)
    assert await following.poll()
    assert following.state.fresh_at_ms(0) is not None
    go_on, started, start_over = threading.Event(), threading.Event(), following.state.start_over_partitions
    at_the_start: list[int | None] = []

    def slowly(numbers: Any, reason: str, now_ms: int) -> None:
        started.set()
        go_on.wait(60)
        start_over(numbers, reason, now_ms)

    def contradicts_itself(reads: Any) -> Any:
        raise RemoteLogMetadataError("a segment that is not there")

    def observed(txn: Any, database: Any, prefix: bytes) -> None:
        at_the_start.append(following.state.fresh_at_ms(0))
        delete_prefix(txn, database, prefix)

    monkeypatch.setattr(following.state, "start_over_partitions", slowly)
    monkeypatch.setattr(writer_module, "delete_prefix", observed)
    cluster.logs[0] += finished(2, 10)
    with monkeypatch.context() as patch:
        patch.setattr(following.state, "apply", contradicts_itself)
        assert not await following.poll()
    poll = asyncio.create_task(following.poll())
    await asyncio.to_thread(started.wait, 20)
    assert not following.follower.is_fresh(0, 60_000)
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await following.follower.ensure_fresh(0, 60_000, 100)
    go_on.set()
    await poll
    # The processes that share the state knew it before the state was empty.
    assert set(at_the_start) == {None}


async def test_a_leader_that_is_cut_off_makes_nothing_fresh(cluster: Cluster, following: Following) -> None:
    """It answers as ever, and lacks what its successor commits; the others know of that one, or of nothing at all."""
    cluster.isr = [NODE, 2, 3]
    cluster.leaders = dict.fromkeys((NODE, 2, 3), Leader(NODE, 4))
    assert await following.poll()
    assert cluster.epochs_fetched == [4, 4]
    known_ms = following.follower.fresh_at_ms(0)
    assert known_ms is not None
    del cluster.leaders[2], cluster.leaders[3]
    for _ in range(2):
        await following.poll()
    assert following.follower.fresh_at_ms(0) == known_ms, "nobody but itself says that it leads"
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await following.follower.ensure_fresh(0, 0, 50)
    cluster.leaders[3] = Leader(3, 5)
    await following.follower._leadership.confirm(1_000)
    assert following.follower._partitions[0].leader == Leader(3, 5)
    assert following.follower.fresh_at_ms(0) == known_ms
    cluster.leaders = {NODE: Leader(3, 5)}
    assert await following.poll()
    fresh_ms = following.follower.fresh_at_ms(0)
    assert fresh_ms is not None
    assert fresh_ms > known_ms


@pytest.mark.parametrize("hanging", [2, 3])
async def test_a_broker_that_hangs_holds_up_no_proof_that_another_one_leads(
    cluster: Cluster, following: Following, hanging: int
) -> None:
    cluster.isr = [NODE, 2, 3]
    cluster.leaders = dict.fromkeys((NODE, 2, 3), Leader(NODE, 4))
    cluster.hanging[hanging] = asyncio.Event()
    partition = following.follower._partitions[0]
    before_ms = following.now_ms
    async with asyncio.timeout(60):
        await following.follower._leadership.confirm(600_000, partition)
    as_of_ms = partition.holds_as_of(Leader(NODE, 4), 1 << 40)
    assert as_of_ms is not None
    assert as_of_ms > before_ms


async def test_a_topic_that_was_grown_is_read_on(cluster: Cluster, following: Following) -> None:
    assert await following.poll()
    cluster.logs[2] = []
    await following.follower._leadership.confirm(1_000)
    assert await following.poll()


async def test_an_answer_counts_no_more_once_another_leader_is_known(cluster: Cluster, following: Following) -> None:
    cluster.leaders = dict.fromkeys((NODE, 2), Leader(NODE, 4))
    cluster.isr = [NODE, 2]
    fetch = cluster.fetch

    async def overtaken(*arguments: Any, **options: Any) -> Any:
        cluster.leaders = dict.fromkeys((NODE, 2), Leader(2, 5))
        await following.follower._leadership.confirm(1_000)
        return await fetch(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follower_module, "fetch_raw", overtaken)
        await following.poll()
    assert following.follower.fresh_at_ms(0) is None


async def test_an_answer_that_was_overtaken_is_not_replayed(cluster: Cluster, following: Following) -> None:
    cluster.logs[0] = finished(1, 0)
    late = [cluster._fetched(0, 0)]
    cluster.logs[0] += [
        to(segment(1, 0, 9), State.DELETE_SEGMENT_STARTED),
        to(segment(1, 0, 9), State.DELETE_SEGMENT_FINISHED),
    ]
    partition = following.follower._partitions[0]
    reads = [await following.follower._read(partition, each, OffsetAndEpoch(0, -1), True) for each in late]
    assert await following.poll()
    answers = [Answer(partition, OffsetAndEpoch(0, -1), each, 1_000_000) for each in reads if each is not None]
    await following.follower._followed.replay(answers, following.follower._followed.now())
    assert following.follower.position(0) == 4
    assert list(following.state.list_remote_log_segments(segment(1, 0, 9).topic_id_partition)) == []
    assert following.follower.is_fresh(0, 60_000)


async def test_partitions_that_no_broker_serves_give_one_line(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    fetched, codes = cluster._fetched, {0: 6, 1: 75}
    monkeypatch.setattr(
        cluster, "_fetched", lambda number, *asked: replace(fetched(number, *asked), error=codes[number])
    )
    assert not await following.poll()
    (line,) = caplog.records
    assert line.message == "some metadata partitions cannot be read yet"
    assert (line.__dict__["metadata_partitions"], line.__dict__["error_codes"]) == (2, [6, 75])
    codes[0] = 0
    assert not await following.poll()
    assert len(caplog.records) == 1
    following.follower._partitions[1].unknown = "a record of a later release"  # another line says so
    assert await following.poll()
    assert [each.message for each in caplog.records[1:]] == ["all metadata partitions can be read"]


@pytest.mark.parametrize("broken", ["the bytes", "the replay"])
async def test_unreadable_records_stop_their_metadata_partition_alone(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    cluster.logs = {0: finished(1, 0), 1: finished(2, 100)}
    fetched, apply = cluster._fetched, following.state.apply

    def damaged(number: int, *asked: int) -> FetchedPartition:
        answer = fetched(number, *asked)
        if number == 1:
            records = bytearray(answer.records)
            records[-1] ^= 1
            answer = replace(answer, records=memoryview(records))
        return answer

    def breaks(reads: list[PartitionRead]) -> list[RemoteLogSegmentId]:
        if any(read.metadata_partition == 1 for read in reads):
            raise ZeroDivisionError
        return apply(reads)

    with monkeypatch.context() as patch:
        if broken == "the bytes":
            patch.setattr(cluster, "_fetched", damaged)
        else:
            patch.setattr(following.state, "apply", breaks)
        for _ in range(2):
            assert not await following.poll()
            assert following.follower.fresh_at_ms(0) is not None
            assert following.follower.fresh_at_ms(1) is None
            assert (following.follower.position(0), following.follower.position(1)) == (2, 0)
            assert "records of metadata partition 1 cannot be read" in str(following.follower.trouble)
            assert following.follower.trouble_of_all is None
    assert await following.poll()
    assert following.follower.position(1) == 2
    assert following.follower.trouble is None
    assert following.follower.fresh_at_ms(1) is not None


@pytest.mark.parametrize("why", ["lost records", "may be lost", None])
async def test_a_write_is_read_back_at_its_place_in_its_epoch(
    cluster: Cluster, following: Following, why: str | None
) -> None:
    """The log lost records unnoticed, or an election may have put another record at the offset of the written one."""
    cluster.logs[0] = finished(1, 0)
    before = following.follower.known(0)
    assert before == (0, -1), "without a known leader epoch, none can change"
    assert await following.poll()
    if why is None:
        await following.follower.read_past(0, 0, before, 60_000)
        return
    before = following.follower.known(0)
    cluster.logs[0] = finished(2, 0)
    if why == "may be lost":
        before = OffsetAndEpoch(0, before.leader_epoch)
        cluster.leaders = {NODE: Leader(NODE, before.leader_epoch + 1)}
        assert await following.poll()
    with pytest.raises(RemoteLogMetadataNotReadyError, match=why):
        await following.follower.read_past(0, 0, before, 60_000)
    assert following.follower.fresh_at_ms(0) is None


@pytest.mark.parametrize("max_age_ms", [200, 500, 5_000])
def test_a_quiet_topic_stays_fresh_without_a_question(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_age_ms: int
) -> None:
    """No record ends a poll, so each one takes its whole time, and tells of the time at which it began."""
    answered = cluster.fetch

    async def long_poll(client: object, node_id: int, positions: list[Any], **options: Any) -> Any:
        await asyncio.sleep(options["max_wait_ms"] / 1000)
        return await answered(client, node_id, positions, **options)

    monkeypatch.setattr(follower_module, "fetch_raw", long_poll)
    loop, state = VirtualLoop(), open_state(tmp_path)
    follower = MetadataFollower(
        cluster,  # type: ignore[arg-type]  # a client as far as the follower uses it
        TOPIC,
        state,
        clock_ms=lambda: loop.now_ms,
        wall_clock_ms=lambda: loop.now_ms,
        max_age_ms=max_age_ms,
    )
    ages: list[int] = []

    async def main() -> None:
        running = asyncio.create_task(follower.run())
        await asyncio.sleep(2)
        for _ in range(1_000):
            await asyncio.sleep(0.01)
            ages.append(follower.oldest_age_ms() or 0)
        running.cancel()
        await asyncio.wait([running])

    loop.run_until_complete(main())
    loop.close()
    follower.close()
    state.close()
    assert max(ages) < max_age_ms


@pytest.mark.parametrize(
    ("fails", "error"),
    [("apply", lmdb.MapFullError("mdb_put: MDB_MAP_FULL")), ("unfinished_rebuilds", ZeroDivisionError("unexpected"))],
    ids=["full", "broken"],
)
async def test_a_state_that_cannot_be_written_is_trouble_and_not_fresh(
    cluster: Cluster,
    following: Following,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
    error: Exception,
) -> None:
    cluster.logs[0] = finished(1, 0)
    works = getattr(following.state, fails)

    def raises(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(following.state, fails, raises)
    reading = asyncio.create_task(following.follower.run())
    try:
        await until(lambda: following.follower.trouble is not None)
        assert str(error) in str(following.follower.trouble)
        assert following.follower.oldest_age_ms() is None
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await following.follower.ensure_fresh(0, 60_000, 50)
        assert [each.message for each in caplog.records].count("the remote log metadata is not followed") == 1
        monkeypatch.setattr(following.state, fails, works)
        await following.follower.ensure_fresh(0, 60_000, 20_000)
        await until(lambda: following.follower.trouble is None)
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def test_a_full_disk_does_not_hinder_the_closing(
    following: Following, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await following.poll()

    def full(read_at_ms: object) -> None:
        raise lmdb.DiskError("No space left on device")

    monkeypatch.setattr(following.state, "mark_read_to_end", full)
    following.follower.close()


def test_a_state_without_room_is_kept_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_one = open_state(tmp_path)
    made = segment(1, 0, 9)
    with_one.apply([PartitionRead(0, [MetadataEvent(0, NOW_MS, key_of(made), made)], 1)])
    with_one.close()

    def full(env: lmdb.Environment) -> None:
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Databases, "open", full)
        with pytest.raises(RemoteLogMetadataError, match="No space left"):
            open_state(tmp_path)
    again = open_state(tmp_path)
    assert again.next_offset(0) == 1
    again.close()


async def test_a_topic_is_read_to_its_end_for_as_long_as_more_of_it_comes(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time longer than any wait for a record: a topic of a million segments takes minutes to read."""
    whole = cluster.logs[0] = finished(1, 0) + finished(2, 10) + finished(3, 20)
    ensure_fresh = following.follower.ensure_fresh
    waits: list[int] = []

    async def two_records_a_wait(metadata_partition: int, max_age_ms: int, timeout_ms: int) -> None:
        reached = following.follower.position(0)
        try:
            await ensure_fresh(metadata_partition, max_age_ms, 1 if reached < len(cluster.logs[0]) else timeout_ms)
        except RemoteLogMetadataNotReadyError:
            waits.append(reached)
            cluster.logs[0], all_of_it = whole[: reached + 2], cluster.logs[0]
            await following.poll()
            cluster.logs[0] = all_of_it
            raise

    monkeypatch.setattr(following.follower, "ensure_fresh", two_records_a_wait)
    await read_all(following.follower, TOPIC, 0, 30_000)
    assert waits == [0, 2, 4]
    assert following.state.remote_end_offset(segment(3, 20, 29).topic_id_partition) == 29
    cluster.logs[0] = whole + finished(4, 30)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="metadata partition 0 was not read to its end"):
        await read_all(following.follower, TOPIC, 0, 30_000)
    assert waits == [0, 2, 4, 6], "nothing more came"
