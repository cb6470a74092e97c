"""The transaction coordinator: the classic protocol, before KIP-890's second version."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kafka.protocol.producer import (
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnResponse,
    EndTxnResponse,
    InitProducerIdResponse,
)

from protocol.errors import ErrorCode
from tests.support.simulation.cluster import SimCluster, SimPartition
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.replica_log import ABORT, COMMIT, marker

_INVALID_PRODUCER_ID_MAPPING = 49
_INVALID_TXN_STATE = 48
_TRANSACTION_ABORTABLE = 120


@dataclass(eq=False)
class _Transactional:
    producer_id: int
    epoch: int
    timeout_ms: int
    state: str = "Empty"
    began_ms: int = 0
    partitions: list[SimPartition] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    """The groups whose offsets belong to the transaction."""
    ended_as: str = ""


class TransactionCoordinator:
    def __init__(self, loop: VirtualLoop, rng: random.Random, cluster: SimCluster) -> None:
        self._loop = loop
        self._rng = rng
        self._cluster = cluster
        self._ids: dict[str, _Transactional] = {}
        self._next_producer_id = 1_000
        self.on_end: Callable[[str, bool], None] = lambda name, is_commit: None

    def new_producer_id(self) -> int:
        self._next_producer_id += 1
        return self._next_producer_id

    def begin(self, partition: SimPartition, timeout_ms: int = 10_000) -> int:
        """Begins a transaction of a new producer of the workload, and returns the producer's id."""
        producer_id = self.new_producer_id()
        one = self._ids[f"user-{producer_id}"] = _Transactional(producer_id, 0, timeout_ms)
        self._add(one, partition)
        return producer_id

    def finish(self, producer_id: int, *, is_commit: bool) -> None:
        """Ends the transaction, unless it ended by its timeout."""
        one = self._ids[f"user-{producer_id}"]
        if one.state == "Ongoing":
            self._begin_to_end(one, COMMIT if is_commit else ABORT)

    def init_producer_id(self, request: Any) -> Any:
        one = self._ids.get(request.transactional_id)
        code = 0
        if one is None:
            one = _Transactional(self.new_producer_id(), 0, request.transaction_timeout_ms)
            self._ids[request.transactional_id] = one
        elif one.state == "Ongoing":
            one.epoch += 1
            self._begin_to_end(one, ABORT)
            code = ErrorCode.CONCURRENT_TRANSACTIONS
        elif one.state in ("PrepareCommit", "PrepareAbort"):
            code = ErrorCode.CONCURRENT_TRANSACTIONS
        else:
            one.epoch += 1
            one.state, one.timeout_ms = "Empty", request.transaction_timeout_ms
        return InitProducerIdResponse(
            throttle_time_ms=0,
            error_code=code,
            producer_id=-1 if code else one.producer_id,
            producer_epoch=-1 if code else one.epoch,
        )

    def _checked(self, name: str, producer_id: int, epoch: int) -> tuple[int, _Transactional | None]:
        one = self._ids.get(name)
        if one is None or one.producer_id != producer_id:
            return _INVALID_PRODUCER_ID_MAPPING, None
        if one.epoch != epoch:
            return ErrorCode.PRODUCER_FENCED, None
        if one.state in ("PrepareCommit", "PrepareAbort"):
            return ErrorCode.CONCURRENT_TRANSACTIONS, one
        return 0, one

    def add_partitions(self, request: Any) -> Any:
        name = request.v3_and_below_transactional_id
        code, one = self._checked(name, request.v3_and_below_producer_id, request.v3_and_below_producer_epoch)
        results = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
        answered = []
        for topic in request.v3_and_below_topics:
            partitions = []
            for index in topic.partitions:
                if not code and one is not None:
                    self._add(one, self._cluster.topics[topic.name].partitions[index])
                partitions.append(
                    results.AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=code)
                )
            answered.append(results(name=topic.name, results_by_partition=partitions))
        return AddPartitionsToTxnResponse(
            throttle_time_ms=0, error_code=0, results_by_transaction=[], results_by_topic_v3_and_below=answered
        )

    def _add(self, one: _Transactional, partition: SimPartition | None) -> None:
        if one.state != "Ongoing":
            one.state, one.began_ms, one.partitions, one.groups = "Ongoing", self._loop.now_ms, [], set()
        if partition is not None and partition not in one.partitions:
            one.partitions.append(partition)

    def add_offsets(self, request: Any) -> Any:
        code, one = self._checked(request.transactional_id, request.producer_id, request.producer_epoch)
        if not code and one is not None:
            self._add(one, None)
            one.groups.add(request.group_id)
        return AddOffsetsToTxnResponse(throttle_time_ms=0, error_code=code)

    def verify(self, partition: SimPartition, producer_id: int, epoch: int) -> int:
        """Returns an error code unless the producer has an open transaction to which the partition was added."""
        one = next((each for each in self._ids.values() if each.producer_id == producer_id), None)
        if one is None:
            return _INVALID_PRODUCER_ID_MAPPING
        if one.epoch != epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if one.state in ("PrepareCommit", "PrepareAbort"):
            return ErrorCode.CONCURRENT_TRANSACTIONS
        return ErrorCode.NONE if one.state == "Ongoing" and partition in one.partitions else _INVALID_TXN_STATE

    def verify_offsets(self, name: str, producer_id: int, epoch: int, group_id: str) -> int:
        """Returns an error code unless the transaction is open, and the group's offsets were added to it (KIP-890)."""
        one = self._ids.get(name)
        if one is None or one.producer_id != producer_id:
            return _INVALID_PRODUCER_ID_MAPPING
        if one.epoch != epoch:
            return ErrorCode.INVALID_PRODUCER_EPOCH
        if one.state in ("PrepareCommit", "PrepareAbort"):
            return ErrorCode.CONCURRENT_TRANSACTIONS
        return ErrorCode.NONE if one.state == "Ongoing" and group_id in one.groups else _TRANSACTION_ABORTABLE

    def end(self, request: Any) -> Any:
        code, one = self._checked(request.transactional_id, request.producer_id, request.producer_epoch)
        how = COMMIT if request.committed else ABORT
        if not code and one is not None:
            if one.state == "Ongoing":
                self._begin_to_end(one, how)
            elif one.state != "Complete" or one.ended_as != how:
                code = _INVALID_TXN_STATE
        return EndTxnResponse(throttle_time_ms=0, error_code=code)

    def _begin_to_end(self, one: _Transactional, how: str) -> None:
        one.state, one.ended_as = "PrepareCommit" if how == COMMIT else "PrepareAbort", how
        self._loop.later(self._rng.uniform(0.001, 0.02), self._write_markers, one, one.epoch)

    def _write_markers(self, one: _Transactional, epoch: int) -> None:
        left = list(one.partitions)

        def written(partition: SimPartition) -> None:
            left.remove(partition)
            if not left:
                one.state = "Complete"

        if not left:
            one.state = "Complete"
        for partition in list(left):
            self._write_marker(one, epoch, partition, written)

    def _write_marker(
        self, one: _Transactional, epoch: int, partition: SimPartition, written: Callable[[SimPartition], None]
    ) -> None:
        """Writes one marker as with acks=all, and writes it again when the leader changed before all replicas had it.

        The coordinator of a real cluster repeats WriteTxnMarkers until a leader answers without an error. So no marker
        is lost with a leader that stops, and a log may have a marker twice."""
        broker = self._cluster.brokers.get(partition.leader)
        is_able = broker is not None and broker.is_up and not broker.is_cut_off
        if broker is None or not is_able or len(partition.isr) < partition.topic.min_isr:
            self._loop.later(0.1, self._write_marker, one, epoch, partition, written)
            return
        leader_epoch, at_ms = partition.leader_epoch, self._cluster.wall_ms()
        batch = marker(partition.log.end, leader_epoch, one.producer_id, epoch, one.ended_as, at_ms)
        self._cluster.append_batch(broker, partition, batch)

        def look() -> None:
            if partition.leader_epoch != leader_epoch:
                self._loop.later(0.1, self._write_marker, one, epoch, partition, written)
            elif partition.log.high_watermark >= batch.next_offset:
                written(partition)
            else:
                return
            partition.watchers.remove(look)

        partition.watchers.append(look)
        look()

    def expire(self) -> None:
        for one in self._ids.values():
            if one.state == "Ongoing" and self._loop.now_ms - one.began_ms > one.timeout_ms:
                one.epoch += 1
                self._begin_to_end(one, ABORT)
