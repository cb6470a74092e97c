"""The producers' states against a naive model of Kafka's rules, and their order in the file."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from protocol.records.record_batch import RecordBatch
from tiers.segment.producer_state import PRODUCER_ID_EXPIRATION_MS, ProducerState, ProducerStateEntry
from tiers.segment.transactions import EndTransactionMarker, TransactionTracker

T = 1_600_000_000_000
TRANSACTIONAL, CONTROL = 1 << 4, 1 << 5
Step = tuple[str, int, int, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(("data", "transactional", "marker")),
        st.sampled_from((-1, 7, 8)),  # producer
        st.integers(0, 1),  # epoch
        st.integers(1, 3),  # records
        st.sampled_from((-1, 0, 10, 2**31 - 2)),  # sequence
        st.integers(-2, 2),  # timestamp
    ),
    max_size=12,
)


def batch(kind: str, producer: int, epoch: int, first: int, count: int, sequence: int, step: int) -> RecordBatch:
    flags = {"data": 0, "transactional": TRANSACTIONAL, "marker": TRANSACTIONAL | CONTROL}[kind]
    return RecordBatch(0, 100, first, first + count - 1, 0, 2, 0, flags, T, T + step, producer, epoch, sequence, count)


def model(batches: list[tuple[str, RecordBatch]], producer: int) -> ProducerStateEntry | None:
    own = [(kind, each) for kind, each in batches if each.producer_id == producer]
    if producer < 0 or not own:
        return None
    epoch = own[-1][1].producer_epoch
    since = max((n for n, (_, each) in enumerate(own, 1) if each.producer_epoch != epoch), default=0)
    data = [each for kind, each in own[since:] if kind != "marker"][-1:]
    sequence = data[0].base_sequence if data else -1
    last_sequence = -1 if sequence < 0 else (sequence + data[0].records_count - 1) % 2**31
    ended = max((n for n, (kind, _) in enumerate(own, 1) if kind == "marker"), default=0)
    begun = [each.base_offset for kind, each in own[ended:] if kind == "transactional"][:1]
    return ProducerStateEntry(
        producer,
        epoch,
        last_sequence,
        data[0].last_offset if data else -1,
        data[0].records_count - 1 if data else 0,
        own[-1][1].max_timestamp,
        7 if ended else -1,
        begun[0] if begun else -1,
    )


@given(STEPS, st.integers(0, 12))
def test_the_state_follows_kafkas_rules_and_is_taken_over(steps: list[Step], handed_on: int) -> None:
    state, tracker = ProducerState(), TransactionTracker(0, {}, (), 0)
    batches, offset = list[tuple[str, RecordBatch]](), 0
    for number, (kind, producer, epoch, count, sequence, step) in enumerate(steps):
        if number == handed_on:
            state = ProducerState(state.entries(T, tracker.ongoing))
            tracker = TransactionTracker(offset, tracker.ongoing, (), 0)
        if kind == "marker":
            one = batch(kind, abs(producer), epoch, offset, 1, -1, step)
            marker = EndTransactionMarker(one.producer_id, offset, aborts=True, coordinator_epoch=7)
            state.on_marker(one, marker)
            tracker.on_marker(marker)
        else:
            one = batch(kind, producer, epoch, offset, count, sequence, step)
            state.on_data_batch(one)
            tracker.on_data_batch(one)
        batches.append((kind, one))
        offset = one.last_offset + 1
    found = {each.producer_id: each for each in state.entries(T, tracker.ongoing)}
    assert found == {each: entry for each in (-1, 1, 7, 8) if (entry := model(batches, each)) is not None}


def test_idle_producers_are_left_out_and_the_others_in_the_order_of_java() -> None:
    """The orders are those in which Java's `new HashMap<Long, ...>` iterates."""
    state = ProducerState()
    for producer in (17, 1, 65536, 15, 0, 1 << 32, 33):
        state.on_data_batch(batch("data", producer, 0, 0, 1, 0, 0))
    assert [one.producer_id for one in state.entries(T, {})] == [0, 17, 1, 65536, 1 << 32, 33, 15]
    for producer in range(100, 107):
        state.on_data_batch(batch("data", producer, 0, 0, 1, 0, 0))
    assert [one.producer_id for one in state.entries(T, {})] == [0, 1, 65536, 1 << 32, 33, *range(100, 107), 15, 17]
    state.on_data_batch(batch("transactional", 9, 0, 0, 1, 0, 0))
    assert len(state.entries(T + PRODUCER_ID_EXPIRATION_MS - 1, {9: 0})) == 15
    assert [one.producer_id for one in state.entries(T + PRODUCER_ID_EXPIRATION_MS, {9: 0})] == [9]
