"""The pool bounds running and waiting downloads and their bytes, fairly. A download outlives its waiters."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from tiers.errors import ReaderQueueFullError, RemoteStorageError, RetriableRemoteStorageError
from tiers.reader import fetcher_pool
from tiers.reader.fetcher_pool import FetcherPool, Flight
from tiers.tracing import current_trace, in_trace


class Downloads:
    """Downloads that end when they are told to; `started` is the order of admission."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.contexts: list[str] = []
        self._gates: dict[str, asyncio.Event] = {}

    def make(self, name: str) -> Callable[[], Awaitable[str]]:
        self._gates[name] = asyncio.Event()

        async def download() -> str:
            self.started.append(name)
            self.contexts.append(current_trace())
            await self._gates[name].wait()
            return name

        return download

    async def end(self, *names: str) -> None:
        """Ends downloads. Each must be the last one that was admitted when it is its turn."""
        for name in names:
            await settle()
            assert self.started[-1] == name
            self._gates[name].set()
        await settle()


@pytest.fixture
def downloads() -> Downloads:
    return Downloads()


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_admission_is_round_robin_over_connections(downloads: Downloads) -> None:
    """A download that waited has the context of its beginning, not of the one that made room."""
    async with FetcherPool[str](threads=1) as pool:
        for name in ("a1", "a2", "a3"):
            with in_trace(name):
                pool.start([name], 1, 1, downloads.make(name))
        pool.start(["b1"], 1, 2, downloads.make("b1"))
        await downloads.end("a1", "a2", "b1", "a3")  # a backfill's next download is one turn, not the whole queue
        assert downloads.contexts == ["a1", "a2", "", "a3"]
        assert pool.running_count == pool.pending_count == pool.bytes_in_flight == 0


async def test_bytes_in_flight_are_bounded_but_one_download_always_runs(downloads: Downloads) -> None:
    async with FetcherPool[str](threads=4, max_bytes_in_flight=100) as pool:
        pool.start(["big"], 500, 1, downloads.make("big"))
        pool.start(["small"], 50, 1, downloads.make("small"))
        await downloads.end("big", "small")
        assert downloads.started == ["big", "small"]


async def test_a_download_that_does_not_fit_the_queue_is_refused(downloads: Downloads) -> None:
    async with FetcherPool[str](threads=1, max_pending_tasks=1) as pool:
        for name in "ab":
            pool.start([name], 1, 1, downloads.make(name))
        with pytest.raises(ReaderQueueFullError):
            pool.start(["c"], 1, 1, downloads.make("c"))


async def test_a_queued_flight_goes_with_its_last_waiter(downloads: Downloads) -> None:
    async with FetcherPool[str](threads=1) as pool:
        pool.start(["a"], 1, 1, downloads.make("a"))
        queued = pool.start(["b"], 1, 1, downloads.make("b"))
        async with asyncio.TaskGroup() as group:
            waiters = [group.create_task(queued.wait()) for _ in range(2)]
            await settle()
            waiters[0].cancel()
            await settle()
            assert pool.flight("b") is queued
            waiters[1].cancel()
        assert pool.flight("b") is None
        assert pool.pending_count == 0
        await downloads.end("a")
        assert downloads.started == ["a"]


async def test_a_failure_or_a_stall_frees_the_slot(downloads: Downloads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher_pool, "_DOWNLOAD_TIMEOUT_MS", 1)

    async def fail() -> str:
        raise RetriableRemoteStorageError("no")

    async with FetcherPool[str](threads=1) as pool:
        for download, text in ((fail, "no"), (downloads.make("a"), "moved none for 1 ms")):
            with pytest.raises(RetriableRemoteStorageError, match=text):
                await pool.start(["a"], 1, 1, download).wait()
            await settle()
            assert pool.has_idle_slot


async def test_leaving_the_pool_cancels_what_runs_and_what_waits(downloads: Downloads) -> None:
    async with FetcherPool[str](threads=1) as pool:
        flights = [pool.start([name], 1, 1, downloads.make(name)) for name in ("a", "b")]
        await settle()
    for flight in flights:
        with pytest.raises(asyncio.CancelledError):
            await flight.wait()
    with pytest.raises(RemoteStorageError, match="closed"):
        pool.start(["c"], 1, 1, downloads.make("c"))


async def test_a_full_queue_gives_way_to_a_connection_with_less_in_it(downloads: Downloads) -> None:
    async def is_refused(flight: Flight[str]) -> bool:
        try:
            await flight.wait()
        except ReaderQueueFullError:
            return True
        return False

    async with FetcherPool[str](threads=1, max_pending_tasks=4) as pool:
        flights = [pool.start([name], 1, 1, downloads.make(name)) for name in ("a1", "a2", "a3", "a4", "a5")]
        async with asyncio.TaskGroup() as group:
            waiters = [group.create_task(is_refused(flight)) for flight in flights]
            await settle()
            for name in ("b1", "b2"):
                pool.start([name], 1, 2, downloads.make(name))
            for name, connection_id in (("b3", 2), ("a6", 1)):  # neither takes more than its half
                with pytest.raises(ReaderQueueFullError):
                    pool.start([name], 1, connection_id, downloads.make(name))
            await settle()
            assert pool.flight("a5") is None
            assert pool.pending_count == 4
            await downloads.end("a1", "a2", "b1", "a3", "b2")
        assert [waiter.result() for waiter in waiters] == [False, False, False, True, True]
        assert pool.pending_count == pool.running_count == 0


async def test_a_second_download_takes_only_idle_slots_and_bytes(downloads: Downloads) -> None:
    async with FetcherPool[str](threads=3, max_bytes_in_flight=100) as pool:
        pool.start(["a"], 40, 1, downloads.make("a"))
        assert not pool.take_idle_slot(61)
        assert pool.take_idle_slot(60)
        assert (pool.running_count, pool.bytes_in_flight) == (2, 100)
        pool.start(["b"], 40, 1, downloads.make("b"))  # has to wait for the bytes
        assert not pool.take_idle_slot(0)
        pool.give_back_slot(60)
        await settle()
        assert downloads.started == ["a", "b"]
        pool.start(["c"], 1, 1, downloads.make("c"))
        assert not pool.take_idle_slot(1)
