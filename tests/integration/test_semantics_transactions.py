"""Aborted transactions across both tiers: a broker could have given every answer, and no aborted record is visible.

The test first asks the broker, which has the whole log. Then the tiers share the log, and every answer must equal the
broker's. Each client must read the same records as from a twin of the topic that only the broker has.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

import pytest
from confluent_kafka import Producer

from protocol.apis.fetch.response import AbortedTransaction, FetchResponse
from protocol.records.record_batch import RecordBatch, verify_batches
from protocol.records.record_reader import read_records
from tests.support.clients import client as clients
from tests.support.clients.all_clients import CLIENTS
from tests.support.clients.client import Client
from tests.support.rigs.late_tier import fetched
from tests.support.rigs.two_tiers_rig import TwoTiers, two_tiers
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of
from tests.support.servers.producing import TRANSACTION_TIMEOUT_MS, create_topic, until_end
from tiers.segment.control_record import end_transaction_marker

pytestmark = pytest.mark.integration

PATTERN = "tiered-*"
TIMEOUT_S = 300.0
READ_COMMITTED = 1
LATEST = -1
VERSIONS = (4, 12, 17)
LIMITS = (1, 25_000, 1 << 20)
"""Limits of a fetch in bytes: for one batch, for several, and for most of the log."""
Record = tuple[int, bytes]
"""An offset and a value."""


class Writer:
    """Writes transactions of several producers to one partition, in batches of ten records of 1000 bytes.

    Every topic gets the same records in the same transactions, so that they have the same offsets.
    """

    def __init__(self, bootstrap: str, *topics: str) -> None:
        self._bootstrap = bootstrap
        self._topics = topics
        self._producers: dict[str, Producer] = {}
        self.end_offset = 0

    def plain(self, count: int) -> None:
        settings: dict[str, str | int | float | bool] = {"batch.num.messages": 10, "enable.idempotence": True}
        producer = Producer({"bootstrap.servers": self._bootstrap, **settings})
        self._send(producer, count)

    def begin(self, name: str) -> None:
        producer = self._producers.get(name)
        if producer is None:
            settings: dict[str, str | int | float | bool] = {"batch.num.messages": 10, "linger.ms": 5}
            settings |= {"transactional.id": f"{self._topics[0]}-{name}"}
            settings |= {"transaction.timeout.ms": TRANSACTION_TIMEOUT_MS}  # clients read meanwhile
            producer = self._producers[name] = Producer({"bootstrap.servers": self._bootstrap, **settings})
            producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()

    def send(self, name: str, count: int) -> None:
        self._send(self._producers[name], count)

    def abort(self, name: str) -> None:
        self._producers[name].abort_transaction(TIMEOUT_S)
        self._ended()

    def commit(self, name: str) -> None:
        self._producers[name].commit_transaction(TIMEOUT_S)
        self._ended()

    def _ended(self) -> None:
        """Waits for the marker, which comes after the coordinator's answer. It has the same offset in every topic."""
        self.end_offset += 1
        for topic in self._topics:
            until_end(self._bootstrap, topic, self.end_offset)

    def _send(self, producer: Producer, count: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        for _ in range(count):
            value = os.urandom(500).hex().encode()
            for topic in self._topics:
                producer.produce(topic, value, partition=0, timestamp=now_ms)
        assert producer.flush(TIMEOUT_S) == 0
        self.end_offset += count

    def transaction(self, name: str, count: int, *, commit: bool) -> None:
        self.begin(name)
        self.send(name, count)
        (self.commit if commit else self.abort)(name)


def decided_history(writer: Writer) -> None:
    writer.plain(10)
    writer.transaction("a", 10, commit=False)  # inside one segment
    writer.transaction("a", 10, commit=True)
    writer.transaction("a", 80, commit=False)  # over several segments
    writer.transaction("a", 10, commit=True)
    writer.transaction("b", 10, commit=True)
    writer.begin("b")  # overlaps other transactions at both ends
    writer.send("b", 20)
    writer.begin("a")
    writer.send("a", 20)
    writer.send("b", 20)
    writer.plain(10)
    writer.abort("b")
    writer.begin("b")
    writer.send("b", 10)
    writer.abort("a")
    writer.transaction("a", 20, commit=True)
    writer.commit("b")
    writer.transaction("c", 10, commit=False)
    writer.transaction("c", 10, commit=False)
    writer.transaction("c", 10, commit=True)
    writer.transaction("a", 90, commit=False)  # across both tiers


class Reference(NamedTuple):
    """The broker's answers while it had the whole log."""

    visible: list[Record]
    batches: list[RecordBatch]
    aborting: dict[int, int]
    """The offsets of the ABORT markers, each with the first offset of its transaction."""
    end_offset: int


def batches_of(response: FetchResponse) -> tuple[memoryview, list[RecordBatch]]:
    (one,) = response.partitions
    assert one.error_code == 0
    records = response.records(one)
    return records, verify_batches(records)


def is_abort(records: memoryview, batch: RecordBatch) -> bool:
    marker = end_transaction_marker(records, batch) if batch.is_control else None
    return marker is not None and marker.aborts


def visible_to_a_set(
    records: memoryview, batches: list[RecordBatch], aborted: tuple[AbortedTransaction, ...]
) -> Iterator[RecordBatch]:
    """Filters as Java, kafka-python and aiokafka do: from a listed first offset to the producer's ABORT marker."""
    waiting = sorted(aborted, key=lambda one: one.first_offset)
    aborting: set[int] = set()
    for batch in batches:
        while waiting and waiting[0].first_offset <= batch.last_offset:
            aborting.add(waiting.pop(0).producer_id)
        if batch.is_control:
            if is_abort(records, batch):
                aborting.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in aborting):
            yield batch


def visible_to_a_list(
    records: memoryview, batches: list[RecordBatch], aborted: tuple[AbortedTransaction, ...]
) -> Iterator[RecordBatch]:
    """Filters as librdkafka and franz-go do: each ABORT marker removes its producer's first entry, in list order."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for producer_id, first_offset in aborted:
        waiting[producer_id].append(first_offset)
    for batch in batches:
        of_producer = waiting[batch.producer_id]
        if batch.is_control:
            if of_producer and is_abort(records, batch):
                of_producer.pop(0)
        elif not (batch.is_transactional and of_producer and batch.base_offset >= of_producer[0]):
            yield batch


FILTERS = (visible_to_a_set, visible_to_a_list)


def values_of(records: memoryview, batches: Iterator[RecordBatch], from_offset: int) -> list[Record]:
    return [
        (record.offset, record.value or b"")
        for batch in batches
        for record in read_records(records, batch)
        if record.offset >= from_offset
    ]


def ask_broker(kafka: KafkaCluster, topic: str) -> Reference:
    with Peer(kafka.address()) as peer:
        topic_id = topic_id_of(kafka.bootstrap_servers, topic)
        response = peer.fetch(17, topic, topic_id, 0, isolation_level=READ_COMMITTED, max_bytes=1 << 23)
    records, batches = batches_of(response)
    aborted = response.aborted_transactions(response.partitions[0])
    assert aborted
    seen = [values_of(records, visible(records, batches, aborted), 0) for visible in FILTERS]
    assert seen[0] == seen[1]
    first_of: dict[int, int] = {}
    aborting: dict[int, int] = {}
    for batch in batches:
        if batch.is_transactional and not batch.is_control:
            first_of.setdefault(batch.producer_id, batch.base_offset)
        elif batch.is_control:
            first = first_of.pop(batch.producer_id, batch.base_offset)
            if is_abort(records, batch):
                aborting[batch.base_offset] = first
    return Reference(seen[0], batches, aborting, batches[-1].next_offset)


def check_answer(response: FetchResponse, offset: int, reference: Reference) -> None:
    records, batches = batches_of(response)
    assert batches, f"nothing at {offset}"
    (one,) = response.partitions
    aborted = response.aborted_transactions(one)
    assert aborted is not None
    assert list(aborted) == sorted(set(aborted), key=lambda entry: entry.first_offset)
    ends = {first: marker for marker, first in reference.aborting.items()}
    for entry in aborted:
        assert ends.get(entry.first_offset, reference.end_offset) >= batches[0].base_offset, f"stale at {offset}"
    until = batches[-1].next_offset
    expected = [record for record in reference.visible if offset <= record[0] < until]
    for visible in FILTERS:
        found = values_of(records, visible(records, batches, aborted), offset)
        assert found == expected, f"{visible.__name__} from {offset} to {until}"


def check_every_start(
    address: tuple[str, int], topic: str, topic_id: UUID, reference: Reference, more: Iterable[int] = ()
) -> None:
    """Checks answers from the start and from the middle of each batch, and from `more` offsets."""
    ends = (offset for batch in reference.batches for offset in (batch.base_offset, batch.last_offset))
    starts = sorted({*ends, *more})
    with Peer(address) as peer:
        for number, offset in enumerate(starts):
            for limit in LIMITS:
                version = VERSIONS[number % len(VERSIONS)]
                ask = partial(peer.fetch, isolation_level=READ_COMMITTED, max_bytes=limit)
                check_answer(fetched(partial(ask, version, topic, topic_id, offset)), offset, reference)


@asynccontextmanager
async def shared_by_two_tiers(kafka: KafkaCluster, folder: Path, topic: str) -> AsyncIterator[TwoTiers]:
    async with two_tiers(kafka, folder, PATTERN) as tiers:
        await tiers.settled(topic)
        yield tiers


@pytest.fixture
def topic(topic_name: str) -> str:
    return f"tiered-{topic_name}"


async def test_every_answer_hides_what_the_broker_hid(kafka: KafkaCluster, tmp_path: Path, topic: str) -> None:
    create_topic(kafka.bootstrap_servers, topic)
    await asyncio.to_thread(decided_history, Writer(kafka.bootstrap_servers, topic))
    reference = await asyncio.to_thread(ask_broker, kafka, topic)
    topic_id = topic_id_of(kafka.bootstrap_servers, topic)
    async with shared_by_two_tiers(kafka, tmp_path, topic) as tiers:
        seam = await tiers.local_log_start(topic)
        assert any(first < seam <= marker for marker, first in reference.aborting.items())
        await asyncio.to_thread(check_every_start, tiers.address, topic, topic_id, reference)
        assert tiers.storage.gets


@pytest.fixture
def twin(kafka: KafkaCluster, topic: str) -> str:
    """Creates the tiered topic, and an untiered twin that is never trimmed. Returns the twin."""
    name = topic.removeprefix("tiered-")
    for each in (topic, name):
        create_topic(kafka.bootstrap_servers, each)
    return name


def every_client_sees_its_twin(tiers: TwoTiers, topic: str, twin: str, starts: Sequence[tuple[int, int]]) -> None:
    """Checks that each client reads the same records through both tiers as from the twin directly.

    `starts` are offsets with the limit of a fetch. The check compares timestamps and headers, at both isolation levels.
    The broker's own log gives the expected counts.
    """
    address, topic_id = tiers.kafka.address(), topic_id_of(tiers.kafka.bootstrap_servers, twin)
    counts = {
        clients.READ_COMMITTED: len(ask_broker(tiers.kafka, twin).visible),
        clients.READ_UNCOMMITTED: sum(
            batch.next_offset - batch.base_offset
            for batch in read_whole(address, twin, topic_id).batches
            if not batch.is_control
        ),
    }
    assert counts[clients.READ_COMMITTED] < counts[clients.READ_UNCOMMITTED]

    def compare_by(client: Client) -> None:
        for isolation, count in counts.items():
            whole = client.read(tiers.kafka.bootstrap_servers, twin, 0, count, isolation)
            for offset, limit in starts:
                expected = [record for record in whole if record.offset >= offset]
                found = client.read(tiers.bootstrap, topic, offset, len(expected), isolation, limit)
                assert found == expected, f"{isolation} from {offset}, {limit} bytes a fetch"

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        for name, seen in {name: pool.submit(compare_by, client) for name, client in CLIENTS.items()}.items():
            try:
                seen.result()
            except BaseException as error:
                error.add_note(f"by {name}")
                raise


async def test_every_client_sees_what_it_sees_of_a_topic_that_is_not_tiered(
    kafka: KafkaCluster, tmp_path: Path, topic: str, twin: str
) -> None:
    """It reads from the start and from the middle of an aborted transaction, one batch at a time and all at once."""
    writer = Writer(kafka.bootstrap_servers, topic, twin)
    await asyncio.to_thread(decided_history, writer)
    await asyncio.to_thread(partial(writer.transaction, "a", 10, commit=True))
    reference = await asyncio.to_thread(ask_broker, kafka, twin)
    longest = max(reference.aborting.items(), key=lambda item: item[0] - item[1])
    async with shared_by_two_tiers(kafka, tmp_path, topic) as tiers:
        starts = ((0, 1), (0, 1 << 20), (sum(longest) // 2, 1))
        await asyncio.to_thread(every_client_sees_its_twin, tiers, topic, twin, starts)
        assert tiers.storage.gets


async def test_a_marker_beyond_the_copied_range(kafka: KafkaCluster, tmp_path: Path, topic: str, twin: str) -> None:
    """An open transaction holds the last stable offset below the marker of another one, and copies end there too."""
    writer = Writer(kafka.bootstrap_servers, topic, twin)

    def undecided() -> None:
        writer.plain(10)
        writer.begin("a")
        writer.send("a", 100)
        writer.begin("b")
        writer.send("b", 10)
        writer.abort("a")
        writer.transaction("a", 10, commit=True)

    await asyncio.to_thread(undecided)
    topic_id = topic_id_of(kafka.bootstrap_servers, topic)
    reference = await asyncio.to_thread(ask_broker, kafka, topic)
    assert reference.end_offset == 110
    async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
        assert await tiers.settled(topic, is_decided=False) > 60
        assert tiers.rlmm.remote_end_offset(await tiers.partition(topic)) == 109
        await asyncio.to_thread(check_every_start, tiers.address, topic, topic_id, reference)
        await asyncio.to_thread(every_client_sees_its_twin, tiers, topic, twin, [(0, 25_000)])

        def decided() -> None:
            writer.commit("b")
            writer.transaction("a", 20, commit=True)
            writer.transaction("a", 60, commit=False)
            writer.transaction("a", 10, commit=True)

        await asyncio.to_thread(decided)
        assert await tiers.settled(topic) > 110
        whole = await asyncio.to_thread(read_whole, tiers.address, topic, topic_id)
        await asyncio.to_thread(check_every_start, tiers.address, topic, topic_id, whole)
        assert [offset for offset, _ in whole.visible[:30]] == [*range(10), *range(110, 120), *range(121, 131)]
        assert len(whole.visible) == 10 + 10 + 10 + 20 + 10
        await asyncio.to_thread(every_client_sees_its_twin, tiers, topic, twin, [(0, 1), (60, 25_000)])


def read_whole(address: tuple[str, int], topic: str, topic_id: UUID) -> Reference:
    """Reads the whole log through the proxy with read_uncommitted, and derives the transactions from the batches."""
    return reference_of(whole_log(address, topic, topic_id))


def whole_log(address: tuple[str, int], topic: str, topic_id: UUID) -> memoryview:
    """Returns the batches up to the high watermark."""
    with Peer(address) as peer:
        ((_, error_code, _, end_offset, _),) = peer.list_offsets(9, topic, [(0, LATEST)])
        assert error_code == 0
        parts: list[bytes] = []
        offset = 0
        while offset < end_offset:
            ask = partial(peer.fetch, 17, topic, topic_id, offset, max_bytes=1 << 23)
            records, batches = batches_of(fetched(ask))
            parts.append(bytes(records))
            offset = batches[-1].next_offset
    return memoryview(b"".join(parts))


def reference_of(log: memoryview) -> Reference:
    """Derives the reference from a complete log in which every transaction has ended."""
    batches = verify_batches(log)
    first_of: dict[int, list[RecordBatch]] = defaultdict(list)
    aborting: dict[int, int] = {}
    hidden: set[int] = set()
    for batch in batches:
        if batch.is_control:
            ended = first_of.pop(batch.producer_id)
            if is_abort(log, batch):
                aborting[batch.base_offset] = ended[0].base_offset
                hidden |= {one.base_offset for one in ended}
        elif batch.is_transactional:
            first_of[batch.producer_id].append(batch)
    shown = (batch for batch in batches if not batch.is_control and batch.base_offset not in hidden)
    return Reference(values_of(log, shown, 0), batches, aborting, batches[-1].next_offset)
