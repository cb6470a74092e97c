"""The bounded pool of remote downloads (`FetcherPool`), and the second GET of a slow one (`HedgedReads`)."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import copy_context
from typing import Any, Generic, Self, TypeVar

from tiers.errors import ReaderQueueFullError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.activity import while_active
from tiers.storage.remote_storage_manager import SegmentReads

T = TypeVar("T")

READ_AHEAD_CONNECTION_ID = -1
_DOWNLOAD_TIMEOUT_MS = 30_000
_SAMPLES = 128
_MIN_SAMPLES = 20
_SLOW_PERCENTILE = 95
_PERCENT = 100
_MAX_CREDIT = 10 * _PERCENT
"""The most credit that can accumulate: ten hedges."""
MAX_HEDGED_PERCENT = 5
_MIN_DELAY_MS = 50
_MAX_DELAY_MS = 2_000


class Flight(Generic[T]):
    """One download, queued or running."""

    def __init__(
        self,
        pool: FetcherPool[T],
        keys: Sequence[Hashable],
        size_bytes: int,
        connection_id: int,
        download: Callable[[], Awaitable[T]],
    ) -> None:
        self.keys = tuple(keys)
        self.size_bytes = size_bytes
        self.connection_id = connection_id
        self._pool = pool
        self._download = download
        self._context = copy_context()
        self._waiters = 0
        self._result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def wait(self) -> T:
        """Returns the result of the download or raises its error. Cancelling the waiter stops no running download."""
        self._waiters += 1
        try:
            return await asyncio.shield(self._result)
        finally:
            self._waiters -= 1
            if self._waiters == 0 and self._pool._remove(self):
                self._result.cancel()
                self._pool._admit()

    def _fail(self, error: Exception) -> None:
        self._result.set_exception(error)
        self._result.exception()  # marks the error as retrieved: asyncio must not log it if no waiter is left


class FetcherPool(Generic[T]):
    """The pool (remote.log.reader.threads, remote.log.reader.max.pending.tasks).

    An asynchronous context manager; leaving it cancels every download.

    * At most `threads` downloads run, with at most `max_bytes_in_flight` in total; one download may always run. At most
      `max_pending_tasks` downloads wait. The pool rejects further ones with `ReaderQueueFullError`.
    * The pool admits downloads round-robin over connections. If the queue is full, a connection with fewer downloads in
      it displaces one of the connection with the most. So a backfill cannot starve another connection's single read.
    * All callers that wait for a key share one flight. A running flight continues without waiters, because its result
      goes to a cache. A queued flight is dropped with its last waiter.
    * A flight is one attempt. A retry that sleeps occupies no slot.
    * A flight has the context variables of the call that began it, also if it waited in the queue.
    """

    def __init__(
        self, *, threads: int = 10, max_pending_tasks: int = 100, max_bytes_in_flight: int = 128 * 1024 * 1024
    ) -> None:
        self._threads = threads
        self._max_pending_tasks = max_pending_tasks
        self._max_bytes_in_flight = max_bytes_in_flight
        self._queues: OrderedDict[int, deque[Flight[T]]] = OrderedDict()
        self._flights: dict[Hashable, Flight[T]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self.pending_count = 0
        self.running_count = 0
        self.bytes_in_flight = 0

    async def __aenter__(self) -> Self:
        self._group = await asyncio.TaskGroup().__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        group, self._group = self._group, None
        for queue in self._queues.values():
            for flight in queue:
                flight._result.cancel()
        self._queues.clear()
        for task in self._tasks:
            task.cancel()
        if group is not None:
            await group.__aexit__(None, None, None)

    @property
    def has_idle_slot(self) -> bool:
        return self.pending_count == 0 and self.running_count < self._threads

    def take_idle_slot(self, size_bytes: int) -> bool:
        """Reserves a slot and bytes for a hedged download. Returns False when another download may need them."""
        if not self.has_idle_slot or self.bytes_in_flight + size_bytes > self._max_bytes_in_flight:
            return False
        self.running_count += 1
        self.bytes_in_flight += size_bytes
        return True

    def give_back_slot(self, size_bytes: int) -> None:
        self.running_count -= 1
        self.bytes_in_flight -= size_bytes
        self._admit()

    def flight(self, key: Hashable) -> Flight[T] | None:
        """Returns the flight that downloads `key`; None when there is none."""
        return self._flights.get(key)

    def start(
        self, keys: Sequence[Hashable], size_bytes: int, connection_id: int, download: Callable[[], Awaitable[T]]
    ) -> Flight[T]:
        """Queues a download of `keys`, and runs it when a slot is free. No key may have a flight already.

        Raises `ReaderQueueFullError`, and `RemoteStorageError` when the pool is closed.
        """
        if self._group is None:
            raise RemoteStorageError("the fetcher pool is closed")
        if self.pending_count >= self._max_pending_tasks and not self._make_room(connection_id):
            raise ReaderQueueFullError(f"the queue of remote reads is full: {self.pending_count} downloads wait")
        flight = Flight(self, keys, size_bytes, connection_id, download)
        self._flights |= dict.fromkeys(flight.keys, flight)
        self._queues.setdefault(connection_id, deque()).append(flight)
        self.pending_count += 1
        self._admit()
        return flight

    def _make_room(self, connection_id: int) -> bool:
        """Drops the last queued download of the connection that has the most, if `connection_id` has fewer.

        Returns whether there is room now.
        """
        longest = max(self._queues.values(), key=len, default=deque[Flight[T]]())
        if len(longest) <= len(self._queues.get(connection_id, ())) + 1:
            return False
        flight = longest[-1]
        self._remove(flight)
        flight._fail(ReaderQueueFullError("the queue of remote reads is full: another connection took the place"))
        return True

    def _admit(self) -> None:
        while self._group is not None and self._queues and self.running_count < self._threads:
            connection_id, queue = next(iter(self._queues.items()))
            flight = queue[0]
            if self.running_count and self.bytes_in_flight + flight.size_bytes > self._max_bytes_in_flight:
                return
            queue.popleft()
            if queue:
                self._queues.move_to_end(connection_id)
            else:
                del self._queues[connection_id]
            self.pending_count -= 1
            self.running_count += 1
            self.bytes_in_flight += flight.size_bytes
            task = self._group.create_task(self._run(flight), context=flight._context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, flight: Flight[T]) -> None:
        try:
            async with while_active(_DOWNLOAD_TIMEOUT_MS / 1000):
                flight._result.set_result(await flight._download())
        except TimeoutError:
            text = f"a download of {flight.size_bytes} bytes moved none for {_DOWNLOAD_TIMEOUT_MS} ms"
            flight._fail(RetriableRemoteStorageError(text))
        except asyncio.CancelledError:
            flight._result.cancel()
            raise
        except Exception as error:
            flight._fail(error)
        finally:
            self._forget(flight)
            self.give_back_slot(flight.size_bytes)

    def _remove(self, flight: Flight[T]) -> bool:
        """Removes a flight from its queue. Returns False if it has left the queue."""
        queue = self._queues.get(flight.connection_id)
        if queue is None or flight not in queue:
            return False
        queue.remove(flight)
        if not queue:
            del self._queues[flight.connection_id]
        self.pending_count -= 1
        self._forget(flight)
        return True

    def _forget(self, flight: Flight[T]) -> None:
        for key in flight.keys:
            del self._flights[key]


class HedgedReads:
    """Reads ranges of segments, and sends a second GET (a hedge) when one takes longer than almost all others.

    * The first success is the result, and the other GET is cancelled. If one GET fails, the other continues. If both
      fail, the call raises the error of the first. If a GET fails before it was hedged, the caller must retry.
    * A GET is slow once it takes longer than the 95th percentile of the last ones, within bounds. The upper bound
      applies until there are enough samples.
    * A GET has at most one hedge, at most `max_percent` of all GETs are hedged, and a hedge only uses an idle slot of
      the pool. So hedging does not add load to a store that is slow for all GETs.
    * Both GETs end with the call: a deadline or a cancellation of the call ends both.
    """

    def __init__(
        self,
        store: SegmentReads,
        slots: FetcherPool[Any],
        clock_ms: Callable[[], int],
        max_percent: int = MAX_HEDGED_PERCENT,
    ) -> None:
        """`clock_ms` is monotonic."""
        self._store = store
        self._slots = slots
        self._max_percent = max_percent
        self._clock_ms = clock_ms
        self._latencies_ms: deque[int] = deque(maxlen=_SAMPLES)
        self._credit = 0
        """Each GET adds `max_percent` to the credit; a hedge takes 100 from it."""
        self.hedged_requests = 0
        self.downloaded_bytes = 0
        """The bytes of all GETs that succeeded, also of those whose result is not needed."""

    @property
    def delay_ms(self) -> int:
        """The time after which a GET is hedged."""
        if len(self._latencies_ms) < _MIN_SAMPLES:
            return _MAX_DELAY_MS
        slow_ms = sorted(self._latencies_ms)[len(self._latencies_ms) * _SLOW_PERCENTILE // _PERCENT]
        return min(max(slow_ms, _MIN_DELAY_MS), _MAX_DELAY_MS)

    async def fetch(self, segment: RemoteLogSegmentMetadata, start: int, end: int) -> memoryview:
        """Returns the stored bytes `[start, end]`, both inclusive."""

        async def attempt() -> memoryview | Exception:
            # The attempt returns its error. If it raised, the task group would cancel the other attempt.
            try:
                return await self._get(segment, start, end)
            except Exception as error:
                return error

        size_bytes = end + 1 - start
        began_ms = self._clock_ms()
        self._credit = min(self._credit + self._max_percent, _MAX_CREDIT)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(attempt())
            await asyncio.wait([first], timeout=(self.delay_ms + 1) / 1000)  # the latencies are rounded down
            attempts = [first]
            if not first.done() and self._may_hedge(size_bytes):
                second = group.create_task(attempt())
                second.add_done_callback(lambda _: self._slots.give_back_slot(size_bytes))
                attempts.append(second)
            _, pending = await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
            if pending and not any(map(_has_succeeded, attempts)):
                await asyncio.wait(pending)
            winner = next(filter(_has_succeeded, attempts), first)
            for one in attempts:
                one.cancel()
        outcome = winner.result()
        if isinstance(outcome, Exception):
            raise outcome
        self._latencies_ms.append(self._clock_ms() - began_ms)
        return outcome

    async def _get(self, segment: RemoteLogSegmentMetadata, start: int, end: int) -> memoryview:
        found = await self._store.fetch_log_segment(segment, start, end)
        self.downloaded_bytes += len(found)
        return found

    def _may_hedge(self, size_bytes: int) -> bool:
        if self._credit < _PERCENT or not self._slots.take_idle_slot(size_bytes):
            return False
        self._credit -= _PERCENT
        self.hedged_requests += 1
        return True


def _has_succeeded(attempt: asyncio.Task[memoryview | Exception]) -> bool:
    return attempt.done() and not isinstance(attempt.result(), Exception)
