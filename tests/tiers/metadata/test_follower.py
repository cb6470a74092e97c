"""`MetadataFollower` over scripted answers: what may be believed while the state is emptied, full, or just written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest
from kafka.protocol.metadata import MetadataRequest

from protocol.errors import ErrorCode
from tests.tiers.metadata.test_committed_records import batch
from tests.tiers.metadata.test_state import IDENTITY, NOW_MS, Record, open_state, segment, to
from tiers.broker.client import Leader
from tiers.broker.cluster_metadata import Broker, ClusterMetadata
from tiers.broker.fetch import FetchedPartition
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata import follower as follower_module
from tiers.metadata.follower import MetadataFollower
from tiers.metadata.metadata_topic import MetadataTopic
from tiers.metadata.serde import encode_key, encode_value, key_of
from tiers.metadata.state_layout import Databases
from tiers.metadata.state_replay import MetadataEvent, PartitionRead
from tiers.metadata.state_writer import RemoteLogMetadataStateWriter
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_state import RemoteLogSegmentState as State

TOPIC = MetadataTopic("cluster", "__remote_log_metadata", IDENTITY.topic_id, 2, 86_400_000)
NODE = 1
FINISHED = State.COPY_SEGMENT_FINISHED


class Cluster:
    """One broker leads both metadata partitions. `logs` holds their records; as a `BrokerClient` and a Fetch."""

    def __init__(self) -> None:
        self.logs: dict[int, list[Record]] = {0: [], 1: []}
        self.log_start = 0
        self.leaders = {NODE: Leader(NODE, 0)}
        """Who leads, by the broker that says so."""
        self.isr = [NODE]
        self.error_of_latest = ErrorCode.NONE
        self.high_watermark: int | None = None
        """Of every answer to a Fetch; None: the log's end."""
        self.epochs_fetched: list[int] = []
        self.hanging: dict[int, asyncio.Event] = {}

    async def metadata(self, max_age_ms: int, timeout_ms: int) -> ClusterMetadata:
        return self.cached_metadata

    @property
    def cached_metadata(self) -> ClusterMetadata:
        brokers = {node_id: Broker(node_id, "broker", 9092) for node_id in self.leaders}
        return ClusterMetadata("cluster", NODE, brokers, {}, 0)

    async def request(self, node_id: int, message: Any, timeout_ms: int, *, min_version: int) -> Any:
        if node_id in self.hanging:
            await self.hanging[node_id].wait()
        return self._named(node_id) if isinstance(message, MetadataRequest) else self._listed(message)

    def _named(self, witness: int) -> Any:
        leader = self.leaders[witness]
        partitions = [
            SimpleNamespace(
                partition_index=number,
                leader_id=leader.node_id,
                leader_epoch=leader.leader_epoch,
                replica_nodes=self.isr,
                isr_nodes=self.isr,
                error_code=0,
            )
            for number in self.logs
        ]
        topic = SimpleNamespace(
            name=TOPIC.name, topic_id=TOPIC.topic_id, partitions=partitions, is_internal=False, error_code=0
        )
        return SimpleNamespace(cluster_id="cluster", controller_id=NODE, brokers=[], topics=[topic])

    def _listed(self, message: Any) -> Any:
        partitions = [
            SimpleNamespace(
                partition_index=asked.partition_index,
                error_code=ErrorCode.NONE if asked.timestamp == -2 else self.error_of_latest,
                offset=self.log_start if asked.timestamp == -2 else len(self.logs[asked.partition_index]),
            )
            for asked in message.topics[0].partitions
        ]
        return SimpleNamespace(topics=[SimpleNamespace(partitions=partitions)])

    async def fetch(self, client: object, node_id: int, positions: list[Any], **options: object) -> Any:
        await asyncio.sleep(0.001)
        self.epochs_fetched += [each.leader_epoch for each in positions]
        return [self._fetched(each.partition, each.offset) for each in positions]

    def _fetched(self, number: int, offset: int) -> FetchedPartition:
        end = len(self.logs[number])
        is_held = self.log_start <= offset <= end
        error = ErrorCode.NONE if is_held else ErrorCode.OFFSET_OUT_OF_RANGE
        records = [(encode_key(key_of(each)), encode_value(each)) for each in self.logs[number][offset:]]
        raw = b"".join(batch(offset + index, [record]) for index, record in enumerate(records))
        end = end if self.high_watermark is None else self.high_watermark
        return FetchedPartition(TOPIC.topic_id, number, error, end, end, 0, (), memoryview(raw))


class Following:
    def __init__(self, cluster: Cluster, state: RemoteLogMetadataStateWriter) -> None:
        self.state = state
        self.now_ms = 1_000
        self.seen: list[RemoteLogSegmentId] = []
        self.follower = MetadataFollower(
            cluster,  # type: ignore[arg-type]  # a client as far as the follower uses it
            TOPIC,
            state,
            clock_ms=self._tick,
            wall_clock_ms=lambda: NOW_MS,
            on_finished=self.seen.extend,
            jitter=lambda: 0.01,
        )

    def _tick(self) -> int:
        self.now_ms += 1
        return self.now_ms

    async def poll(self) -> bool:
        await self.follower._leadership.confirm(1_000)
        return await self.follower._poll(NODE, [0, 1])


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(follower_module, "fetch_raw", cluster.fetch)
    return cluster


@pytest.fixture
def following(cluster: Cluster, tmp_path: Path) -> Any:
    state = open_state(tmp_path)
    following = Following(cluster, state)
    yield following
    following.follower.close()
    state.close()


def finished(number: int, start: int) -> list[Record]:
    made = segment(number, start, start + 9)
    return [made, to(made, FINISHED)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # no event says so
            await asyncio.sleep(0.002)


async def test_after_a_loss_of_records_the_state_is_kept_and_is_not_fresh(
    cluster: Cluster, following: Following
) -> None:
    cluster.logs = {0: finished(1, 0), 1: finished(2, 100)}
    assert await following.poll()
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
        assert following.follower.position(0) == len(cluster.logs[0])
        assert following.state.remote_end_offset(lost) == 109
    cluster.logs[1] = records
    assert await following.poll()
    assert following.follower.trouble is None
    assert following.follower.is_fresh(1, 60_000)


async def test_a_loss_of_records_is_seen_by_a_look_at_the_end_alone(cluster: Cluster, following: Following) -> None:
    cluster.logs[0] = finished(1, 0)
    assert await following.poll()
    cluster.logs[0] = []
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await following.follower.ensure_fresh(0, 0, 50)
    assert "was read to 2" in str(following.follower.trouble)


async def test_a_new_leaders_first_answers_are_no_loss_of_records(cluster: Cluster, following: Following) -> None:
    """Its high watermark may lie below what was committed before it."""
    cluster.logs[0] = finished(1, 0)
    assert await following.poll()
    cluster.leaders[NODE] = Leader(NODE, 5)
    cluster.error_of_latest = ErrorCode.OFFSET_NOT_AVAILABLE
    cluster.high_watermark = 1
    assert not await following.poll()
    assert following.follower.trouble is None


async def test_how_far_a_topic_was_read_outlives_the_state_that_read_it(cluster: Cluster, tmp_path: Path) -> None:
    """It was too old, say, and what it held is to be read again; from a topic that was emptied meanwhile."""
    state = open_state(tmp_path)
    cluster.logs[0] = finished(1, 0)
    before = Following(cluster, state)
    assert await before.poll()
    before.follower.close()
    state.start_over("it is old")
    state.start_over("it is old again")
    assert state.next_offset(0) == 0
    cluster.logs[0] = []
    again = Following(cluster, state)
    assert not await again.poll()
    assert not again.follower.is_fresh(0, 60_000)
    assert "ends at 0 and was read to 2" in str(again.follower.trouble)
    cluster.logs[0] = finished(1, 0)
    assert await again.poll()
    assert again.follower.is_fresh(0, 60_000)
    again.follower.close()
    state.start_over("another topic", is_same_topic=False)
    assert state.reached(0) == 0
    state.close()


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
    go_on, started, start_over = threading.Event(), threading.Event(), following.state.start_over
    at_the_start: list[int | None] = []

    def slowly(reason: str) -> None:
        started.set()
        go_on.wait(20)
        start_over(reason)

    def contradicts_itself(reads: Any) -> Any:
        raise RemoteLogMetadataError("a segment that is not there")

    clear = following.state._clear

    def observed(is_same_topic: bool) -> None:
        at_the_start.append(following.state.fresh_at_ms(0))
        clear(is_same_topic)

    monkeypatch.setattr(following.state, "start_over", slowly)
    monkeypatch.setattr(following.state, "_clear", observed)
    cluster.logs[0] += finished(2, 10)
    with monkeypatch.context() as patch:
        patch.setattr(following.state, "apply", contradicts_itself)
        with pytest.raises(RemoteLogMetadataError):
            await following.poll()
    poll = asyncio.create_task(following.poll())
    await asyncio.to_thread(started.wait, 20)
    assert not following.follower.is_fresh(0, 60_000)
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await following.follower.ensure_fresh(0, 60_000, 100)
    go_on.set()
    await poll
    # Who shares the state knew before it was empty.
    assert at_the_start == [None]


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
    assert following.follower._leadership.led_by(NODE) == []
    assert following.follower.fresh_at_ms(0) == known_ms
    cluster.leaders = {NODE: Leader(3, 5)}
    assert await following.poll()
    fresh_ms = following.follower.fresh_at_ms(0)
    assert fresh_ms is not None
    assert fresh_ms > known_ms


async def test_a_broker_that_hangs_holds_up_no_proof_that_another_one_leads(
    cluster: Cluster, following: Following
) -> None:
    cluster.isr = [NODE, 2, 3]
    cluster.leaders = dict.fromkeys((NODE, 2, 3), Leader(NODE, 4))
    cluster.hanging[3] = asyncio.Event()
    leadership = following.follower._leadership
    before_ms = following.now_ms
    async with asyncio.timeout(20):
        await leadership.confirm(600_000, 0)
    as_of_ms = leadership.holds_as_of(0, Leader(NODE, 4), 1 << 40)
    assert as_of_ms is not None
    assert as_of_ms > before_ms


async def test_one_that_answers_a_moment_later_is_heard(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiers.metadata.leadership._NEWER_WITHIN_MS", 60_000)
    cluster.isr = [NODE, 2, 3]
    cluster.leaders = {NODE: Leader(NODE, 4), 2: Leader(NODE, 4), 3: Leader(3, 5)}
    cluster.hanging[3] = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, cluster.hanging[3].set)
    await following.follower._leadership.confirm(1_000, 0)
    assert following.follower._leadership.led_by(3) == [0, 1]


async def test_a_leader_that_nobody_else_has_named_yet_is_waited_for(cluster: Cluster, following: Following) -> None:
    cluster.isr = [NODE, 2]
    cluster.leaders = dict.fromkeys((NODE, 2), Leader(NODE, 4))
    cluster.hanging[2] = asyncio.Event()
    asyncio.get_running_loop().call_later(0.01, cluster.hanging[2].set)
    await following.follower._leadership.confirm(1_000, 0)
    assert following.follower._leadership.holds_as_of(0, Leader(NODE, 4), 1) == 1


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


async def test_a_new_leader_whose_high_watermark_lags_makes_nothing_fresh(
    cluster: Cluster, following: Following
) -> None:
    """It has all that was committed before it, and may not show it yet."""
    cluster.error_of_latest = ErrorCode.OFFSET_NOT_AVAILABLE
    assert not await following.poll()
    assert following.follower.fresh_at_ms(0) is None
    cluster.error_of_latest = ErrorCode.NONE
    assert await following.poll()
    assert following.follower.fresh_at_ms(0) is not None


async def test_an_answer_that_was_overtaken_is_not_replayed(cluster: Cluster, following: Following) -> None:
    cluster.logs[0] = finished(1, 0)
    late = [cluster._fetched(0, 0)]
    cluster.logs[0] += [
        to(segment(1, 0, 9), State.DELETE_SEGMENT_STARTED),
        to(segment(1, 0, 9), State.DELETE_SEGMENT_FINISHED),
    ]
    reads = [await following.follower._read(each, 0, True) for each in late]
    assert await following.poll()
    await following.follower._replay([each for each in reads if each is not None], {0: 0}, {0: 1_000_000})
    assert following.follower.position(0) == 4
    assert list(following.state.list_remote_log_segments(segment(1, 0, 9).topic_id_partition)) == []
    assert following.follower.is_fresh(0, 60_000)


async def test_a_segment_is_seen_before_anybody_can_look_it_up(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.logs[0] = finished(1, 0)
    apply, seen_at_commit = following.state.apply, []

    def then(reads: Any) -> Any:
        seen_at_commit.append(list(following.seen))
        return apply(reads)

    monkeypatch.setattr(following.state, "apply", then)
    assert await following.poll()
    assert seen_at_commit == [[segment(1, 0, 9).segment_id]]


async def test_a_full_state_is_trouble_and_not_fresh_until_there_is_room(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.logs[0] = finished(1, 0)
    apply = following.state.apply

    def full(reads: Any) -> Any:
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    monkeypatch.setattr(following.state, "apply", full)
    reading = asyncio.create_task(following.follower.run())
    try:
        await until(lambda: following.follower.trouble is not None)
        assert "MDB_MAP_FULL" in str(following.follower.trouble)
        assert following.follower.oldest_age_ms() is None
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await following.follower.ensure_fresh(0, 60_000, 50)
        assert [each.message for each in caplog.records].count("the remote log metadata is not followed") == 1
        monkeypatch.setattr(following.state, "apply", apply)
        await following.follower.ensure_fresh(0, 60_000, 20_000)
        await until(lambda: following.follower.trouble is None)
        assert following.follower.events_read == 2
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def test_an_error_that_nobody_thought_of_is_trouble_and_ends_nothing(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    poll, broken = following.follower._poll, True

    async def breaks(node_id: int, numbers: list[int]) -> bool:
        if broken:
            raise ZeroDivisionError
        return await poll(node_id, numbers)

    monkeypatch.setattr(following.follower, "_poll", breaks)
    reading = asyncio.create_task(following.follower.run())
    try:
        await until(lambda: following.follower.trouble is not None)
        broken = False
        await until(lambda: following.follower.trouble is None)
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def test_a_full_disk_does_not_hinder_the_closing(
    following: Following, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await following.poll()

    def full(wall_clock_ms: int) -> None:
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
