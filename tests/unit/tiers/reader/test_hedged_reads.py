"""A slow GET gets a second one: in virtual time, against a store whose answers come when the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.fakes.local_indexes import segment_object
from tests.support.simulation.loop import VirtualLoop
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.fetcher_pool import FetcherPool, HedgedReads

SEGMENT, _ = segment_object(0)
FIRST, SECOND = RetriableRemoteStorageError("first"), RemoteResourceNotFoundError("second")
Found = bytes | RemoteStorageError


class Stage:
    """`answers` are what the next GETs find, each with the milliseconds that it takes; then an answer comes at once."""

    def __init__(self, max_percent: int = 100) -> None:
        self.loop = VirtualLoop()
        self.pool = FetcherPool[bytes](threads=1)
        self.reads = HedgedReads(self, self.pool, self.now_ms, max_percent)
        self.answers: Iterator[tuple[int, Found]] = iter(())
        self.gets: list[str] = []
        """`cancelled` or `ended` for each GET that is over."""

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self.loop.close()

    def now_ms(self) -> int:
        return round(self.loop.time() * 1000)

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        assert (metadata, start_position, end_position) == (SEGMENT, 5, 14)
        latency_ms, found = next(self.answers, (0, b""))
        try:
            await asyncio.sleep(latency_ms / 1000)
        except asyncio.CancelledError:
            self.gets.append("cancelled")
            raise
        self.gets.append("ended")
        if isinstance(found, RemoteStorageError):
            raise found
        return memoryview(found)

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        raise NotImplementedError

    def run(self, work: Coroutine[Any, Any, Found]) -> Found:
        return self.loop.run_until_complete(work)

    def read(self, *answers: tuple[int, Found]) -> Found:
        """Returns the bytes, or the error. All slots are free afterwards."""
        self.gets.clear()
        self.answers = iter(answers)

        async def fetch() -> Found:
            try:
                return bytes(await self.reads.fetch(SEGMENT, 5, 14))
            except RemoteStorageError as error:
                return error

        found = self.run(fetch())
        assert (self.pool.running_count, self.pool.bytes_in_flight) == (0, 0)
        return found

    def take(self, *latencies_ms: int) -> None:
        for latency_ms in latencies_ms:
            self.read((latency_ms, b""), (latency_ms, b""))


@pytest.fixture
def stage() -> Iterator[Stage]:
    with Stage() as made:
        yield made


@pytest.mark.parametrize(
    ("answers", "found", "gets"),
    [
        ([(2000, b"1"), (0, b"2")], b"1", ["ended"]),
        ([(2000, FIRST), (0, b"2")], FIRST, ["ended"]),
        ([(3000, b"1"), (5000, b"2")], b"1", ["ended", "cancelled"]),
        ([(9000, b"1"), (10, b"2")], b"2", ["ended", "cancelled"]),
        ([(3000, FIRST), (5000, b"2")], b"2", ["ended", "ended"]),
        ([(3000, SECOND), (5000, b"2")], b"2", ["ended", "ended"]),
        ([(9000, b"1"), (10, SECOND)], b"1", ["ended", "ended"]),
        ([(3000, FIRST), (5000, SECOND)], FIRST, ["ended", "ended"]),
        ([(9000, FIRST), (10, SECOND)], FIRST, ["ended", "ended"]),
    ],
)
def test_the_first_success_is_the_result(
    stage: Stage, answers: list[tuple[int, Found]], found: Found, gets: list[str]
) -> None:
    """The limit is 2 seconds at first."""
    assert stage.read(*answers) == found
    assert stage.gets == gets
    assert stage.reads.hedged_requests == len(gets) - 1
    assert stage.reads.downloaded_bytes == len(gets) - gets.count("cancelled") - [
        isinstance(answer, Exception) for _, answer in answers[: len(gets)]
    ].count(True)


def test_a_caller_that_gives_up_ends_both(stage: Stage) -> None:
    async def give_up() -> bytes:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(4):
                await stage.reads.fetch(SEGMENT, 5, 14)
        return b""

    stage.answers = iter([(9000, b""), (9000, b"")])
    stage.run(give_up())
    assert (stage.gets, stage.pool.running_count) == (["cancelled", "cancelled"], 0)


def test_no_second_get_without_an_idle_slot(stage: Stage) -> None:
    stage.pool.take_idle_slot(1)
    stage.answers = iter([(9000, b"1")])
    assert stage.run(stage.reads.fetch(SEGMENT, 5, 14)) == b"1"  # type: ignore[arg-type]  # a view of these bytes
    assert stage.gets == ["ended"]


@settings(max_examples=40, deadline=None)
@given(slow=st.lists(st.booleans(), max_size=60), percent=st.integers(1, 50))
def test_hedges_are_never_more_than_their_part(slow: list[bool], percent: int) -> None:
    with Stage(percent) as stage:
        for number, is_slow in enumerate(slow, 1):
            before = stage.reads.hedged_requests
            stage.take(9000 if is_slow else 0)
            assert stage.reads.hedged_requests - before <= is_slow
            assert stage.reads.hedged_requests * 100 <= number * percent
    if all(slow):
        assert stage.reads.hedged_requests == len(slow) * percent // 100


def test_calm_times_save_up_only_a_few_hedges() -> None:
    with Stage(50) as stage:
        stage.take(*[1] * 100, *[9000] * 24)
    assert stage.reads.hedged_requests == 21


def test_slow_is_what_takes_longer_than_almost_all_others(stage: Stage) -> None:
    assert stage.reads.delay_ms == 2_000
    for latencies, delay_ms in (
        (range(101, 120), 2_000),
        (range(120, 201), 196),
        ([3] * 128, 50),
        ([60_000] * 10, 2_000),
    ):
        stage.take(*latencies)
        assert stage.reads.delay_ms == delay_ms


def test_a_get_that_was_hedged_still_counts_as_slow(stage: Stage) -> None:
    """Otherwise the limit would sink with every hedge."""
    stage.take(*[100] * 128)
    for _ in range(7):
        stage.read((9000, b""), (150 - 1, b""))
    assert stage.reads.hedged_requests == 7
    assert stage.reads.delay_ms == 250
