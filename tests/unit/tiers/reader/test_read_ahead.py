"""Windows grow while their streams have to wait, and never exceed the budget together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.remote_tier import TOPIC_ID
from tiers.model.ids import TopicIdPartition
from tiers.reader.read_ahead import IDLE_MS, ReadAhead

P0 = TopicIdPartition(TOPIC_ID, 0)


class Streams:
    """Reads of streams that are all sequential unless a test says another offset."""

    def __init__(self, budget_bytes: int = 1000, max_streams: int = 100) -> None:
        self.now_ms = 0
        self.ahead = ReadAhead(
            lambda: self.now_ms,
            budget_bytes=budget_bytes,
            first_window_bytes=10,
            max_window_bytes=40,
            max_streams=max_streams,
        )
        self.next_offsets: dict[int, int] = {}

    def read(self, connection_id: int, *, waits: bool = False, offset: int | None = None) -> int:
        offset = self.next_offsets.get(connection_id, 0) if offset is None else offset
        self.next_offsets[connection_id] = offset + 10
        return self.ahead.window_bytes((connection_id, P0), offset, offset + 10, had_to_wait=waits)

    def read_times(self, times: int, connection_id: int) -> int:
        """The last window of several reads that all had to wait."""
        return [self.read(connection_id, waits=True) for _ in range(times)][-1]


def test_a_window_doubles_while_the_stream_has_to_wait() -> None:
    streams = Streams()
    assert [streams.read(1, waits=True) for _ in range(5)] == [0, 10, 20, 40, 40]
    assert [streams.read(1) for _ in range(3)] == [40, 40, 40]
    assert streams.read(1, offset=500) == 0
    assert streams.ahead.reserved_bytes == 0


def test_a_stream_that_never_waits_keeps_its_first_window() -> None:
    streams = Streams()
    assert [streams.read(1) for _ in range(10)] == [0, *[10] * 9]


def test_a_client_may_ask_again_for_the_end_of_its_answer() -> None:
    streams = Streams()
    assert [streams.read(1, waits=True, offset=offset) for offset in (0, 5, 10, 30)] == [0, 10, 20, 0]


def test_an_idle_stream_gives_its_window_up() -> None:
    streams = Streams(budget_bytes=50)
    assert streams.read_times(4, 1) == 40
    streams.now_ms = IDLE_MS + 1
    assert streams.read_times(4, 2) == 40
    assert streams.ahead.reserved_bytes == 40
    assert [streams.read_times(4, 3), streams.read(2)] == [30, 20]
    assert streams.ahead.reserved_bytes == 50
    assert streams.read(1) == 0  # as if it were new


def test_streams_that_read_share_the_budget_evenly() -> None:
    streams = Streams(budget_bytes=80)
    for _ in range(3):
        for connection_id in range(1, 5):
            streams.read_times(4, connection_id)
    assert [streams.read(connection_id, waits=True) for connection_id in range(1, 5)] == [20, 20, 20, 20]


def test_no_window_is_halved_below_the_first() -> None:
    streams = Streams(budget_bytes=20)
    assert streams.read_times(3, 1) == 20
    assert streams.read_times(2, 2) == 10
    assert streams.read_times(2, 3) == 0
    assert [streams.read(1), streams.read(2)] == [10, 10]


def test_the_oldest_stream_of_too_many_is_forgotten() -> None:
    streams = Streams(max_streams=2)
    for connection_id in (1, 2, 3):
        streams.read_times(2, connection_id)
    assert streams.ahead.reserved_bytes == 20
    assert streams.read(1) == 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 3), st.booleans(), st.integers(0, IDLE_MS)), max_size=60))
def test_the_budget_holds_whatever_is_read(reads: list[tuple[int, int, bool, int]]) -> None:
    streams = Streams(budget_bytes=70, max_streams=3)
    for connection_id, offset, waits, pause_ms in reads:
        streams.now_ms += pause_ms
        window = streams.read(connection_id, waits=waits, offset=offset)
        assert 0 <= window <= 40
        assert 0 <= streams.ahead.reserved_bytes <= 70
        assert streams.ahead.reserved_bytes == sum(each.window_bytes for each in streams.ahead._streams.values())
