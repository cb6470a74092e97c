from __future__ import annotations

from protocol.records.record_batch import RecordBatch
from tiers.segment.producer_state import PRODUCER_ID_EXPIRATION_MS, ProducerState, ProducerStateEntry
from tiers.segment.transactions import EndTransactionMarker

T = 1_600_000_000_000
A, B = 4000, 4001
TRANSACTIONAL, CONTROL = 1 << 4, 1 << 5


def batch(
    producer: int, first: int, last: int, *, epoch: int = 0, sequence: int = 0, timestamp_ms: int = T, flags: int = 0
) -> RecordBatch:
    return RecordBatch(
        0, 100, first, last, 0, 2, 0, flags, T, timestamp_ms, producer, epoch, sequence, last - first + 1
    )


def end(state: ProducerState, producer: int, offset: int, *, epoch: int = 0, timestamp_ms: int = T) -> None:
    flags = TRANSACTIONAL | CONTROL
    control = batch(producer, offset, offset, epoch=epoch, sequence=-1, timestamp_ms=timestamp_ms, flags=flags)
    state.on_marker(control, EndTransactionMarker(producer, offset, aborts=True, coordinator_epoch=7))


def test_an_idempotent_producer_is_known_by_its_last_batch() -> None:
    state = ProducerState()
    state.on_data_batch(batch(A, 0, 9))
    state.on_data_batch(batch(-1, 10, 19))
    state.on_data_batch(batch(A, 20, 24, sequence=10, timestamp_ms=T - 5))
    assert state.entries(T) == (ProducerStateEntry(A, 0, 14, 24, 4, T - 5, -1, -1),)
    state.on_data_batch(batch(A, 25, 34, sequence=2**31 - 3))
    assert state.entries(T)[0].last_sequence == 6  # it begins again after the largest


def test_a_transaction_is_open_from_its_first_batch_to_its_marker() -> None:
    state = ProducerState()
    state.on_data_batch(batch(A, 5, 9, flags=TRANSACTIONAL))
    state.on_data_batch(batch(A, 10, 14, sequence=5, flags=TRANSACTIONAL))
    assert state.entries(T) == (ProducerStateEntry(A, 0, 9, 14, 4, T, -1, 5),)
    end(state, A, 15, timestamp_ms=T + 7)
    assert state.entries(T) == (ProducerStateEntry(A, 0, 9, 14, 4, T + 7, 7, -1),)
    state.on_data_batch(batch(A, 16, 16, sequence=10, flags=TRANSACTIONAL))
    assert state.entries(T) == (ProducerStateEntry(A, 0, 10, 16, 0, T, 7, 16),)


def test_another_epoch_forgets_the_sequences_of_the_one_before() -> None:
    state = ProducerState()
    state.on_data_batch(batch(A, 5, 9, flags=TRANSACTIONAL))
    end(state, A, 10, epoch=1)
    assert state.entries(T) == (ProducerStateEntry(A, 1, -1, -1, 0, T, 7, -1),)
    state.on_data_batch(batch(A, 11, 12, epoch=2, flags=TRANSACTIONAL))
    assert state.entries(T) == (ProducerStateEntry(A, 2, 1, 12, 1, T, 7, 11),)


def test_a_producer_state_that_is_taken_over_goes_on() -> None:
    whole, first = ProducerState(), ProducerState()
    for state in (whole, first):
        state.on_data_batch(batch(A, 0, 9, flags=TRANSACTIONAL))
        state.on_data_batch(batch(B, 10, 19))
    second = ProducerState(first.entries(T))
    for state in (whole, second):
        state.on_data_batch(batch(A, 20, 29, sequence=10, flags=TRANSACTIONAL))
        end(state, B, 30, epoch=1)
    assert second.entries(T) == whole.entries(T)
    assert whole.entries(T)[0].current_txn_first_offset == 0


def test_an_idle_producer_is_left_out_unless_its_transaction_is_open() -> None:
    state = ProducerState()
    state.on_data_batch(batch(A, 0, 0))
    state.on_data_batch(batch(B, 1, 1, flags=TRANSACTIONAL))
    assert len(state.entries(T + PRODUCER_ID_EXPIRATION_MS - 1)) == 2
    assert [one.producer_id for one in state.entries(T + PRODUCER_ID_EXPIRATION_MS)] == [B]


def test_entries_are_in_the_order_of_javas_hash_map() -> None:
    """The orders are those in which Java's `new HashMap<Long, ...>` iterates."""
    state = ProducerState()
    for producer in (17, 1, 65536, 15, 0, 1 << 32, 33):
        state.on_data_batch(batch(producer, 0, 0))
    assert [one.producer_id for one in state.entries(T)] == [0, 17, 1, 65536, 1 << 32, 33, 15]
    for producer in range(100, 107):
        state.on_data_batch(batch(producer, 0, 0))
    assert [one.producer_id for one in state.entries(T)] == [0, 1, 65536, 1 << 32, 33, *range(100, 107), 15, 17]
