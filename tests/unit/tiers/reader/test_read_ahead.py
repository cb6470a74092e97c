"""Windows double for sequential streams and never exceed the budget together."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.remote_tier import TOPIC_ID
from tiers.model.ids import TopicIdPartition
from tiers.reader.read_ahead import ReadAhead

P0 = TopicIdPartition(TOPIC_ID, 0)


def read_ahead(budget_bytes: int = 1000) -> ReadAhead:
    return ReadAhead(budget_bytes=budget_bytes, first_window_bytes=10, max_window_bytes=40, max_streams=3)


def test_a_window_doubles_on_sequential_reads_and_closes_on_a_jump() -> None:
    ahead = read_ahead()
    windows = [ahead.window_bytes((1, P0), 10 * n, 10 * n + 10) for n in range(5)]
    assert windows == [0, 10, 20, 40, 40]
    assert ahead.window_bytes((1, P0), 500, 510) == 0
    assert ahead.reserved_bytes == 0


def test_the_stream_idle_longest_gives_its_window_up() -> None:
    ahead = read_ahead(budget_bytes=50)
    for connection_id in (1, 2):
        for n in range(4):
            ahead.window_bytes((connection_id, P0), n, n + 1)
    assert ahead.reserved_bytes == 40
    assert ahead.window_bytes((1, P0), 4, 5) == 0


@given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5), st.integers(1, 5)), max_size=60))
def test_the_budget_holds_whatever_is_read(reads: list[tuple[int, int, int]]) -> None:
    ahead = read_ahead(budget_bytes=70)
    for connection_id, offset, length in reads:
        window = ahead.window_bytes((connection_id, P0), offset, offset + length)
        assert 0 <= window <= 40
        assert 0 <= ahead.reserved_bytes <= 70
