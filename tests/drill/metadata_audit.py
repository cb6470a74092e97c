"""`MetadataAudit` reads the metadata topic as a read_committed consumer, and checks the proofs of its writers.

For each producer id and epoch it counts the transactions with metadata, and the transactions in which the producer
committed an offset of the group. Both counts must be equal (KIP-447).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator

from protocol.primitives import INT16, Buffer, read_uvarint
from protocol.records.record_batch import RecordBatch, iterate_batches
from protocol.records.record_reader import read_records
from tests.drill.violations import FENCED, Violations
from tiers.broker.client import BrokerClient
from tiers.broker.fetch import READ_COMMITTED, READ_UNCOMMITTED, FetchedPartition, FetchPosition, fetch_raw
from tiers.errors import BrokerError
from tiers.metadata.records.serde import TIER_MARKER_API_KEY, TOPIC_TIER_CONFIG_API_KEY
from tiers.metadata.state.replay import MetadataEvent
from tiers.metadata.topic.committed_records import read_committed

OFFSETS_TOPIC = "__consumer_offsets"
_TIMEOUT_MS = 20_000
_COMMIT_MARKER = 1
_LANE = "drill-audit"
_PROOF_TRIES = 150
_PROOF_PAUSE_S = 0.2

Producer = tuple[int, int]
"""A producer's id and epoch."""


def _needs_ownership(records: Buffer, batch: RecordBatch) -> bool:
    """Whether a batch has a record that only an owner may write. Any process may write a marker and tier settings."""
    anybodys = {TIER_MARKER_API_KEY, TOPIC_TIER_CONFIG_API_KEY}
    return any(
        each.key is None or read_uvarint(each.key, 0)[0] not in anybodys for each in read_records(records, batch)
    )


class _Transactions:
    """Counts the committed transactions with records of one topic that count, by producer."""

    def __init__(self, counts: Callable[[Buffer, RecordBatch], bool] = lambda records, batch: True) -> None:
        self.committed: Counter[Producer] = Counter()
        self._counts = counts
        self._open: dict[tuple[int, int], int] = {}
        self._counting: set[tuple[int, int]] = set()

    def read(self, partition: int, records: Buffer, position: int) -> Iterator[RecordBatch]:
        """Yields the data batches of transactions."""
        for batch in iterate_batches(records):
            if batch.base_offset < position or not batch.is_transactional:
                continue
            of = partition, batch.producer_id
            if not batch.is_control:
                yield batch
                self._open[of] = batch.producer_epoch
                if self._counts(records, batch):
                    self._counting.add(of)
                continue
            epoch, is_counted = self._open.pop(of, None), of in self._counting
            self._counting.discard(of)
            key = next(read_records(records, batch)).key
            is_commit = key is not None and INT16.unpack_from(key, 2)[0] == _COMMIT_MARKER
            if epoch is not None and is_counted and is_commit:
                self.committed[batch.producer_id, epoch] += 1

    def is_open(self, producer: Producer) -> bool:
        return any((producer_id, epoch) == producer for (_, producer_id), epoch in self._open.items())


class MetadataAudit:
    """Use it in one event loop. The caller closes the client."""

    def __init__(self, client: BrokerClient, topic: str, violations: Violations) -> None:
        self._client = client
        self._topic = topic
        self._violations = violations
        self._positions: dict[tuple[str, int], int] = {}
        self._events: list[MetadataEvent] = []
        """The events that were read, and that no call of `events` has returned yet. A later read of it may fail."""
        self._brought = {topic: _Transactions(_needs_ownership), OFFSETS_TOPIC: _Transactions()}
        self._epochs: dict[tuple[int, int], int] = {}
        self.transactions = 0
        self.proofs_waited_for = 0
        """How often a proof existed whose transaction was still open."""

    async def open(self) -> None:
        """Finds the start positions: the beginning of the metadata, and the end of the group offsets.

        Other groups may have written earlier offsets. Call it before the first metadata is written, since it would miss
        earlier proofs. Raises `BrokerError` while a topic does not exist. The first member of any group creates the
        topic of the offsets."""
        metadata = await self._client.metadata(_TIMEOUT_MS)
        for topic in (self._topic, OFFSETS_TOPIC):
            if topic not in metadata.topics:
                raise BrokerError(f"there is no {topic} yet", retriable=True)
            self._positions |= {(topic, number): 0 for number in metadata.topics[topic].partitions}
        await self._read(OFFSETS_TOPIC)
        self._brought[OFFSETS_TOPIC] = _Transactions()

    async def events(self) -> list[MetadataEvent]:
        """Returns the events committed since the last call that returned, up to the current last stable offset."""
        await self._read(self._topic)
        events, self._events = self._events, []
        return events

    async def check_proofs(self) -> None:
        """Checks that every metadata transaction so far has committed an offset as a member of the group."""
        brought, offsets = self._brought[self._topic].committed.copy(), self._brought[OFFSETS_TOPIC]
        proofs = offsets.committed
        for _ in range(_PROOF_TRIES):
            await self._read(OFFSETS_TOPIC)
            unproved = {producer: count for producer, count in brought.items() if proofs[producer] < count}
            # A proof is written before its transaction ends. The markers come to the topics one after the other.
            if not any(map(offsets.is_open, unproved)):
                break
            self.proofs_waited_for += 1
            await asyncio.sleep(_PROOF_PAUSE_S)
        for producer, count in unproved.items():
            self._violations.add(
                FENCED, f"producer {producer[0]} epoch {producer[1]} proved {proofs[producer]} of {count} commits"
            )
        self.transactions = sum(brought.values())

    async def _read(self, topic: str) -> None:
        behind = {number for name, number in self._positions if name == topic}
        metadata = await self._client.metadata(_TIMEOUT_MS)
        leaders = {
            number: said.leader_id for number, said in metadata.topics[topic].partitions.items() if number in behind
        }
        topic_id = metadata.topics[topic].topic_id
        # An open transaction of any group holds back the last stable offset of the topic of offsets.
        isolation_level = READ_COMMITTED if topic == self._topic else READ_UNCOMMITTED
        while behind:
            node_id = leaders[next(iter(behind))]
            asked = sorted(number for number in behind if leaders[number] == node_id)
            positions = [FetchPosition(topic_id, number, self._positions[topic, number]) for number in asked]
            for fetched in await self._fetch(node_id, positions, isolation_level):
                number = fetched.partition
                position = self._positions[topic, number]
                self._events += self._take(topic, fetched, position)
                end = fetched.last_stable_offset if topic == self._topic else fetched.high_watermark
                if self._positions[topic, number] >= end:
                    behind.discard(number)

    async def _fetch(
        self, node_id: int, positions: list[FetchPosition], isolation_level: int
    ) -> list[FetchedPartition]:
        answers = await fetch_raw(
            self._client,
            node_id,
            positions,
            max_bytes=8 << 20,
            isolation_level=isolation_level,
            timeout_ms=_TIMEOUT_MS,
            lane=_LANE,
        )
        for answer in answers:
            if answer.error:
                raise BrokerError("the audit cannot read", answer.error, retriable=True)
        return answers

    def _take(self, topic: str, fetched: FetchedPartition, position: int) -> list[MetadataEvent]:
        number = fetched.partition
        for batch in self._brought[topic].read(number, fetched.records, position):
            if topic == self._topic:
                self._check_epoch(number, batch)
        if topic != self._topic:
            ends = [batch.next_offset for batch in iterate_batches(fetched.records)]
            self._positions[topic, number] = max([position, *ends])
            return []
        read = read_committed(fetched, position)
        if read.foreign_records:
            self._violations.add(
                FENCED,
                f"metadata partition {number}: {read.foreign_records} records from {position} on are not of an owner",
            )
        self._positions[topic, number] = read.next_offset
        return list(read.events)

    def _check_epoch(self, number: int, batch: RecordBatch) -> None:
        """Checks the producer epochs of one transactional id: epochs never decrease."""
        of = number, batch.producer_id
        newest = max(self._epochs.get(of, -1), batch.producer_epoch)
        self._epochs[of] = newest
        if batch.producer_epoch < newest:
            self._violations.add(
                FENCED, f"metadata partition {number} {batch.base_offset}: epoch {batch.producer_epoch} after {newest}"
            )
