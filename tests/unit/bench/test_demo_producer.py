"""The demo's producer, with a client that takes no delivery callback: it would lose an interrupt."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bench import demo_producer
from bench.demo_records import ABORTED_PER_PARTITION, PARTITIONS, batches

RECORDS = 12


class Client:
    """The methods of a producer that the demo calls."""

    left = 0

    def __init__(self, settings: Mapping[str, object]) -> None:
        pass

    def produce(
        self, topic: str, value: bytes, key: bytes | None = None, *, partition: int, timestamp: int = 0
    ) -> None: ...

    def flush(self, timeout_s: float) -> int:
        return self.left

    def poll(self, timeout_s: float) -> int:
        return 0

    def init_transactions(self, timeout_s: float) -> None: ...

    def begin_transaction(self) -> None: ...

    def abort_transaction(self, timeout_s: float) -> None: ...


def test_records_are_produced_without_a_delivery_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_producer, "Producer", Client)
    produced = demo_producer.produce("", batches(RECORDS), 0, lambda _: None)
    assert (produced.records, produced.aborted) == (RECORDS * PARTITIONS, ABORTED_PER_PARTITION * PARTITIONS)


def test_records_that_are_not_acknowledged_in_time_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_producer, "Producer", Client)
    monkeypatch.setattr(demo_producer, "TIMEOUT_S", 0)
    monkeypatch.setattr(Client, "left", 1)
    with pytest.raises(TimeoutError, match="none batches were not acknowledged within 0 s"):
        demo_producer.produce("", batches(RECORDS), 0, lambda _: None)
