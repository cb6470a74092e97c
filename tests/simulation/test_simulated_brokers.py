"""Tests parts of the simulated brokers and machines that no real server is compared with."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import lmdb
import pytest

from protocol.records.record_batch import iterate_batches
from protocol.records.record_reader import read_records
from tests.support.fakes.record_batches import build_batch, record
from tests.support.simulation.cluster import SimCluster, SimPartition
from tests.support.simulation.compaction import compact
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.process import forget_last_commit
from tests.support.simulation.replica_log import ABORT, COMMIT, Batch, ReplicaLog, marker, placed
from tests.support.simulation.transactions import TransactionCoordinator

NOW_MS, RETENTION_MS = 1_700_000_000_000, 1_000


class Transactions:
    """Writes transactions of one record each."""

    def __init__(self) -> None:
        self.log = ReplicaLog()

    def write(self, key: bytes, value: bytes | None, ends: str = COMMIT, producer_id: int = 7) -> None:
        log = self.log
        data = build_batch(0, [record(0, NOW_MS, key, value)], producer_id=producer_id, transactional=True)
        log.append(placed(data, log.end, 0, NOW_MS))
        log.append(marker(log.end, 0, producer_id, 0, ends, NOW_MS))
        log.high_watermark = log.end

    def compact(self, at_ms: int = NOW_MS) -> None:
        compact(self.log, self.log.end, at_ms, RETENTION_MS)

    def records(self) -> list[tuple[int, bytes | None, bytes | None]]:
        return [
            (one.offset, one.key, one.value)
            for batch in self.log.batches
            if not batch.ends
            for view in iterate_batches(batch.data)
            for one in read_records(batch.data, view)
        ]

    def markers(self) -> list[int]:
        return [one.base_offset for one in self.log.batches if one.ends]


@pytest.fixture
def topic() -> Transactions:
    return Transactions()


def test_compaction_keeps_the_last_record_of_a_key(topic: Transactions) -> None:
    topic.write(b"a", b"1")
    topic.write(b"b", b"1")
    topic.write(b"a", b"2")
    topic.compact()
    assert topic.records() == [(2, b"b", b"1"), (4, b"a", b"2")]


def test_compaction_removes_aborted_records_alone(topic: Transactions) -> None:
    topic.write(b"a", b"1")
    topic.write(b"a", b"2", ABORT)
    topic.compact()
    assert topic.records() == [(0, b"a", b"1")]
    assert topic.log.aborted_between(0, 4) == [(7, 2)]


def test_a_tombstone_goes_after_its_time(topic: Transactions) -> None:
    topic.write(b"a", b"1")
    topic.write(b"a", None)
    topic.compact()
    assert topic.records() == [(2, b"a", None)]
    topic.compact(NOW_MS + RETENTION_MS)
    assert topic.records() == []


def test_a_marker_stays_while_records_before_it_do(topic: Transactions) -> None:
    topic.write(b"a", b"1", producer_id=1)
    topic.write(b"b", b"1", ABORT, producer_id=2)
    topic.compact()
    assert topic.markers() == [1, 3]
    topic.compact(NOW_MS + RETENTION_MS)
    assert topic.markers() == [1]
    assert topic.log.aborted_between(0, 4) == []


def test_a_batch_keeps_its_offsets_and_its_checksum(topic: Transactions) -> None:
    log = topic.log
    log.append(placed(build_batch(0, [record(0, NOW_MS, b"a"), record(1, NOW_MS, b"b")]), 0, 0, NOW_MS))
    log.append(placed(build_batch(0, [record(0, NOW_MS, b"b", b"2")]), log.end, 0, NOW_MS))
    topic.compact()
    assert topic.records() == [(0, b"a", b"v"), (2, b"b", b"2")]
    (view,) = iterate_batches(log.batches[0].data)
    assert (view.base_offset, view.last_offset, view.max_timestamp) == (0, 1, NOW_MS)


def test_a_power_failure_may_take_the_last_commit(tmp_path: Path) -> None:
    path = tmp_path / "state.mdb"
    environment = lmdb.open(str(path), subdir=False)
    for value in (b"1", b"2", b"3"):
        with environment.begin(write=True) as txn:
            txn.put(b"key", value)
    environment.close()
    forget_last_commit(path)
    with lmdb.open(str(path), subdir=False) as environment, environment.begin() as txn:
        assert txn.get(b"key") == b"2"


def test_a_torn_state_has_no_commit_to_forget(tmp_path: Path) -> None:
    path = tmp_path / "state.mdb"
    for content in (b"", bytes(5_000)):
        path.write_bytes(content)
        forget_last_commit(path)
        assert path.read_bytes() == content


async def transaction_over_a_stop(loop: VirtualLoop, cluster: SimCluster, ends: str) -> ReplicaLog:
    """Stops the leader right after it wrote the marker of a transaction, and returns the log of the next leader."""
    coordinator = TransactionCoordinator(loop, cluster.rng, cluster)
    (partition,) = cluster.create_topic("orders", 1, {}).partitions
    stopped = partition.leader

    def stop_after_marker(partition: SimPartition, batch: Batch) -> None:
        if batch.ends and cluster.brokers[stopped].is_up:
            cluster.stop(stopped)

    cluster.on_append = stop_after_marker
    producer_id = coordinator.begin(partition)
    data = build_batch(0, [record(0, NOW_MS, b"a")], producer_id=producer_id, transactional=True)
    cluster.append(cluster.brokers[stopped], partition, data)
    await asyncio.sleep(0.1)
    assert partition.log.last_stable_offset == 0
    coordinator.finish(producer_id, is_commit=ends == COMMIT)
    await asyncio.sleep(5)
    assert partition.leader != stopped
    return partition.log


@pytest.mark.parametrize("ends", [COMMIT, ABORT])
def test_a_marker_that_a_leader_lost_is_written_again(ends: str) -> None:
    loop = VirtualLoop()
    log = loop.run_virtual(
        transaction_over_a_stop(loop, SimCluster(loop, random.Random(1), lambda: NOW_MS + loop.now_ms), ends)
    )
    loop.close()
    assert [one.ends for one in log.batches] == ["", ends]
    assert log.last_stable_offset == log.high_watermark == log.end


def log_of(*batches: tuple[int, int, int]) -> ReplicaLog:
    """Returns a log with batches of (first offset, records, leader epoch)."""
    log = ReplicaLog()
    if batches:
        log.reset_to(batches[0][0])
    for first_offset, count, epoch in batches:
        data = build_batch(0, [record(n, NOW_MS) for n in range(count)])
        log.append(placed(data, first_offset, epoch, NOW_MS))
    return log


def spans(log: ReplicaLog) -> list[tuple[int, int, int]]:
    return [(one.base_offset, one.next_offset, one.leader_epoch) for one in log.batches]


def test_the_log_start_of_a_follower_follows_a_truncation_below_it() -> None:
    """As `UnifiedLog.truncateTo` does. The records of the other history never come back."""
    leader = log_of((0, 10, 0), (10, 5, 2), (15, 5, 2))
    follower = log_of((0, 10, 0), (10, 10, 0), (20, 5, 0))
    follower.trim_to(20)
    SimCluster.follow(follower, leader)
    assert (follower.start, spans(follower)) == (10, [(10, 15, 2), (15, 20, 2)])
    follower.bring_back(12)
    assert (follower.start, spans(follower)) == (10, [(10, 15, 2), (15, 20, 2)])


def test_an_empty_follower_begins_with_the_whole_first_batch() -> None:
    """A leader that was trimmed to an offset within a batch answers the whole batch."""
    leader = log_of((0, 10, 0), (10, 5, 0))
    leader.trim_to(7)
    follower = log_of()
    SimCluster.follow(follower, leader)
    assert (follower.start, spans(follower)) == (7, [(0, 10, 0), (10, 15, 0)])


def test_a_follower_with_records_cannot_begin_within_a_batch() -> None:
    """It cuts off its records of another history, and the leader's next batch begins below its log end."""
    leader = log_of((0, 10, 0), (10, 8, 1), (18, 5, 1))
    leader.trim_to(14)
    follower = log_of((0, 10, 0), *((offset, 1, 0) for offset in range(10, 16)))
    assert not SimCluster.follow(follower, leader)
    assert (follower.start, follower.end) == (0, 14)
    leader.trim_to(18)
    assert SimCluster.follow(follower, leader)
    assert (follower.start, spans(follower)) == (18, [(18, 23, 1)])
