"""A delayed Fetch completes exactly once: by an event, at its deadline, or because its client went away."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

import pytest

from proxy.handlers.fetch.delayed import (
    Completion,
    DelayedRemoteFetch,
    DelayedRemoteFetchPurgatory,
    RemotePartitionRead,
)
from tests.support.fakes.segments import PARTITION
from tests.support.tiers.waiting import until
from tiers.broker.client import monotonic_ms
from tiers.errors import RemoteLogError
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteRead, RemoteReadRequest

REQUEST = RemoteReadRequest(PARTITION, 0, 1000, min_one_message=True, isolation_level=0, deadline_ms=0, connection_id=1)
NEVER_MS = 60_000


class ScriptedReader:
    """A reader whose reads end when the test says so."""

    def __init__(self) -> None:
        self.results: list[asyncio.Future[RemoteRead]] = []

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        result: asyncio.Future[RemoteRead] = asyncio.get_running_loop().create_future()
        self.results.append(result)
        return await result

    async def end(self, number: int, size_bytes: int) -> None:
        while len(self.results) <= number:  # noqa: ASYNC110 - a list has no event
            await asyncio.sleep(0)
        self.results[number].set_result(RemoteRead([memoryview(bytes(size_bytes))], size_bytes, 0, 1, None))


@dataclass
class Stage:
    group: asyncio.TaskGroup
    reader: ScriptedReader = field(default_factory=ScriptedReader)
    purgatory: DelayedRemoteFetchPurgatory = field(default_factory=DelayedRemoteFetchPurgatory)
    was_polling: bool = False

    def fetch(
        self, reads: int = 1, *, min_bytes: int = 1, max_wait_ms: int = NEVER_MS, deadline_ms: int = NEVER_MS
    ) -> DelayedRemoteFetch:
        reader = cast("RemoteLogReader", self.reader)
        now_ms = monotonic_ms()
        return DelayedRemoteFetch(
            [RemotePartitionRead(reader, self.group.create_task, REQUEST) for _ in range(reads)],
            monotonic_ms,
            min_bytes=min_bytes,
            local_bytes=0,
            must_answer=False,
            has_unavailable=False,
            max_wait_at_ms=now_ms + max_wait_ms,
            deadline_ms=now_ms + deadline_ms,
        )

    def wait(self, fetch: DelayedRemoteFetch) -> asyncio.Task[Completion]:
        return self.group.create_task(self.purgatory.wait(fetch, self._poll))

    async def until_pending(self, count: int = 1) -> None:
        await until(lambda: self.purgatory.pending_count >= count)

    def _poll(self) -> Coroutine[None, None, None]:
        self.was_polling = True
        return asyncio.sleep(NEVER_MS)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        made = Stage(group)
        yield made
        assert made.purgatory.pending_count == 0
        for result in made.reader.results:
            result.cancel()


async def test_a_satisfied_fetch_never_waits(stage: Stage) -> None:
    fetch = stage.fetch()
    fetch.must_answer = True
    await stage.wait(fetch)
    assert stage.purgatory.completed == {Completion.SATISFIED: 1}
    assert not stage.was_polling


async def test_the_end_of_its_last_read_completes_it(stage: Stage) -> None:
    waiting = stage.wait(stage.fetch(reads=2))
    await stage.until_pending()
    await stage.reader.end(0, 100)
    await asyncio.sleep(0.001)
    assert not waiting.done()
    await stage.reader.end(1, 100)
    await waiting
    assert stage.purgatory.completed == {Completion.SATISFIED: 1}


async def test_new_local_records_complete_it(stage: Stage) -> None:
    fetch = stage.fetch(min_bytes=10)
    waiting = stage.wait(fetch)
    await stage.until_pending()
    fetch.local_bytes = 10
    fetch.wake()
    await waiting
    assert stage.purgatory.completed == {Completion.SATISFIED: 1}
    assert not fetch.reads[0].is_done


async def test_enough_bytes_complete_it_at_max_wait(stage: Stage) -> None:
    fetch = stage.fetch(reads=2, min_bytes=100, max_wait_ms=30)
    waiting = stage.wait(fetch)
    await stage.until_pending()
    await stage.reader.end(0, 100)
    await waiting
    assert stage.purgatory.completed == {Completion.SATISFIED: 1}
    assert not fetch.reads[1].is_done


async def test_a_slow_read_does_not_keep_the_records_of_the_others(stage: Stage) -> None:
    fetch = stage.fetch(reads=2, min_bytes=100, max_wait_ms=1)
    waiting = stage.wait(fetch)
    await stage.reader.end(0, 100)
    await waiting
    fast, slow = weakref.ref(fetch.reads[0]), fetch.reads[1]
    del fetch, waiting
    gc.collect()
    assert not slow.is_done
    assert fast() is None


async def test_the_deadline_completes_it(stage: Stage) -> None:
    fetch = stage.fetch(deadline_ms=1)
    await stage.wait(fetch)
    assert stage.purgatory.completed == {Completion.EXPIRED: 1}
    assert not fetch.reads[0].is_done


async def test_a_deadline_in_the_past_expires_at_once(stage: Stage) -> None:
    await stage.wait(stage.fetch(deadline_ms=0))
    assert stage.purgatory.completed == {Completion.EXPIRED: 1}
    assert not stage.was_polling


async def test_a_client_that_goes_away_cancels_it_and_its_reads(stage: Stage) -> None:
    fetch = stage.fetch()
    waiting = stage.wait(fetch)
    await stage.until_pending()
    waiting.cancel()
    await until(lambda: fetch.reads[0].is_done)
    assert stage.purgatory.completed == {Completion.CANCELLED: 1}


async def test_a_poll_that_fails_cancels_the_reads(stage: Stage) -> None:
    fetch = stage.fetch()

    async def poll() -> None:
        raise RemoteLogError("the connection is lost")

    with suppress(ExceptionGroup):
        await stage.purgatory.wait(fetch, poll)
    await until(lambda: fetch.reads[0].is_done)
    assert stage.purgatory.completed == {Completion.CANCELLED: 1}


async def test_a_read_completes_its_own_fetch_and_no_other(stage: Stage) -> None:
    first, second = stage.wait(stage.fetch()), stage.wait(stage.fetch())
    await stage.until_pending(2)
    await stage.reader.end(1, 100)
    await second
    assert not first.done()
    await stage.reader.end(0, 100)
    await first
    assert stage.purgatory.completed == {Completion.SATISFIED: 2}


async def test_a_read_of_two_entries_of_a_request_is_counted_once(stage: Stage) -> None:
    """The request names its partition twice."""
    (read,) = stage.fetch().reads
    fetch = DelayedRemoteFetch(
        [read, read],
        monotonic_ms,
        min_bytes=1,
        local_bytes=0,
        must_answer=False,
        has_unavailable=False,
        max_wait_at_ms=monotonic_ms() + NEVER_MS,
        deadline_ms=monotonic_ms() + NEVER_MS,
    )
    waiting = stage.wait(fetch)
    await stage.until_pending()
    await stage.reader.end(0, 10)
    assert await waiting is Completion.SATISFIED
