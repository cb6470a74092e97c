"""The records that clients must see of a real broker's log, and the check of a tier's answers against them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import partial
from typing import NamedTuple
from uuid import UUID

from protocol.apis.fetch.response import FetchResponse
from protocol.records.record_batch import RecordBatch, verify_batches
from protocol.records.record_reader import read_records
from tests.support.read_committed import FILTERS, is_abort
from tests.support.rigs.late_tier import fetched
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of

READ_COMMITTED = 1
LATEST = -1
VERSIONS = (4, 12, 17)
LIMITS = (1, 25_000, 1 << 20)
"""Limits of a fetch in bytes: for one batch, for several, and for most of the log."""
Record = tuple[int, bytes]
"""An offset and a value."""


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
