"""How read_committed consumers hide the records of aborted transactions (docs/semantics.md 7)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

from protocol.records.record_batch import RecordBatch
from tiers.segment.transactions import end_transaction_marker


class FirstOffset(Protocol):
    """An entry of a list of aborted transactions."""

    @property
    def producer_id(self) -> int: ...

    @property
    def first_offset(self) -> int: ...


def is_abort(records: bytes | memoryview, batch: RecordBatch) -> bool:
    marker = end_transaction_marker(memoryview(records), batch) if batch.is_control else None
    return marker is not None and marker.aborts


def visible_to_a_set(
    records: bytes | memoryview, batches: Iterable[RecordBatch], aborted: Iterable[FirstOffset]
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
    records: bytes | memoryview, batches: Iterable[RecordBatch], aborted: Iterable[FirstOffset]
) -> Iterator[RecordBatch]:
    """Filters as librdkafka and franz-go do: each ABORT marker removes its producer's first entry, in list order."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for one in aborted:
        waiting[one.producer_id].append(one.first_offset)
    for batch in batches:
        of_producer = waiting[batch.producer_id]
        if batch.is_control:
            if of_producer and is_abort(records, batch):
                of_producer.pop(0)
        elif not (batch.is_transactional and of_producer and batch.base_offset >= of_producer[0]):
            yield batch


FILTERS = (visible_to_a_set, visible_to_a_list)
"""The ways of all clients. Their results must be the same."""
