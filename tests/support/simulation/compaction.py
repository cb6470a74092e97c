"""`Compaction` cleans the logs of a compacted topic, as Kafka's log cleaner does, batch by batch.

A pass removes every batch whose records all have a later record with the same key. It removes a tombstone when an
earlier pass has seen it, `delete.retention.ms` before (KIP-534). It leaves the last batch, open transactions and
markers alone. The records of aborted transactions count for nothing, and stay.
"""

from __future__ import annotations

from typing import NamedTuple

from protocol.records.record_batch import verify_batches
from protocol.records.record_reader import read_records
from tests.support.simulation.cluster import SimPartition
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.replica_log import Batch, ReplicaLog

DELETE_RETENTION_MS = 12_000
"""How long the metadata topic keeps tombstones. Some faults last longer than half of it."""


class _Keys(NamedTuple):
    keys: frozenset[bytes]
    are_tombstones: bool


class Compaction:
    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self._keys: dict[bytes, _Keys] = {}
        self._seen_at_ms: dict[bytes, int] = {}
        """When a pass saw a tombstone first, by its batch."""
        self.tombstones_removed = 0

    def clean(self, partition: SimPartition) -> None:
        if partition.leader < 0:
            return
        log, kept_ms = partition.log, int(partition.topic.configs["delete.retention.ms"])
        cleaned = [one for one in log.batches if one.next_offset <= log.last_stable_offset][:-1]
        later: set[bytes] = set()
        gone: set[bytes] = set()
        for batch in reversed(cleaned):
            if batch.ends or _is_aborted(log, batch):
                continue
            keys, are_tombstones = self._keys_of(batch)
            if keys <= later:
                gone.add(batch.data)
            elif are_tombstones:
                seen_at_ms = self._seen_at_ms.setdefault(batch.data, self._loop.now_ms)
                if self._loop.now_ms - seen_at_ms >= kept_ms:
                    gone.add(batch.data)
                    self.tombstones_removed += 1
            later |= keys
        if gone:
            for replica in partition.replicas.values():
                replica.batches = [one for one in replica.batches if one.data not in gone]

    def _keys_of(self, batch: Batch) -> _Keys:
        known = self._keys.get(batch.data)
        if known is None:
            records = [one for view in verify_batches(batch.data) for one in read_records(batch.data, view)]
            keys = frozenset(bytes(one.key or b"") for one in records)
            known = self._keys[batch.data] = _Keys(keys, all(one.value is None for one in records))
        return known


def _is_aborted(log: ReplicaLog, batch: Batch) -> bool:
    return any(
        one.producer_id == batch.producer_id and one.first_offset <= batch.base_offset < one.marker_offset
        for one in log.aborted
    )
