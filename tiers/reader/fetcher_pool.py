"""`FetcherPool`: the bounded pool of remote downloads (remote.log.reader.threads, remote.log.reader.max.pending.tasks).

* At most `threads` downloads run, with at most `max_bytes_in_flight` in total; one download may always run. At most
  `max_pending_tasks` downloads wait. The pool rejects further ones with `ReaderQueueFullError`.
* The pool admits downloads round-robin over connections. If the queue is full, a connection with fewer downloads in it
  displaces one of the connection with the most. So a backfill cannot starve another connection's single read.
* All callers that wait for a key share one flight. A running flight continues without waiters, because its result goes
  to a cache. A queued flight is dropped with its last waiter.
* A flight is one attempt. The backoff between attempts happens outside the pool, so a sleeping retry occupies no slot.
* A flight has the context variables of the call that began it, also if it waited in the queue.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextvars import copy_context
from types import TracebackType
from typing import Generic, Self, TypeVar

from tiers.errors import ReaderQueueFullError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.activity import while_active

T = TypeVar("T")

READ_AHEAD_CONNECTION_ID = -1


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
        self._is_running = False
        self._result: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    async def wait(self) -> T:
        """Returns the result of the download or raises its error. Cancelling the waiter stops no running download."""
        self._waiters += 1
        try:
            return await asyncio.shield(self._result)
        finally:
            self._waiters -= 1
            if self._waiters == 0 and not self._is_running and not self._result.done():
                self._pool._drop(self)

    async def _run(self, timeout_ms: int) -> None:
        try:
            async with while_active(timeout_ms / 1000):
                result = await self._download()
        except TimeoutError:
            self._fail(
                RetriableRemoteStorageError(f"a download of {self.size_bytes} bytes moved none for {timeout_ms} ms")
            )
        except asyncio.CancelledError:
            self._result.cancel()
            raise
        except Exception as error:
            self._fail(error)
        else:
            self._result.set_result(result)

    def _fail(self, error: Exception) -> None:
        self._result.set_exception(error)
        self._result.exception()  # marks the error as retrieved: asyncio must not log it if no waiter is left


class FetcherPool(Generic[T]):
    """An asynchronous context manager; leaving it cancels every download."""

    def __init__(
        self,
        *,
        threads: int = 10,
        max_pending_tasks: int = 100,
        max_bytes_in_flight: int = 128 * 1024 * 1024,
        download_timeout_ms: int = 30_000,
    ) -> None:
        self._threads = threads
        self._max_pending_tasks = max_pending_tasks
        self._max_bytes_in_flight = max_bytes_in_flight
        self._download_timeout_ms = download_timeout_ms
        self._queues: OrderedDict[int, deque[Flight[T]]] = OrderedDict()
        self._flights: dict[Hashable, Flight[T]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self.pending_count = 0
        self.running_count = 0
        self.bytes_in_flight = 0

    async def __aenter__(self) -> Self:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        for key in flight.keys:
            self._flights[key] = flight
        self._queues.setdefault(connection_id, deque()).append(flight)
        self.pending_count += 1
        self._admit()
        return flight

    def _make_room(self, connection_id: int) -> bool:
        """Drops the last queued download of the connection that has the most, if `connection_id` has fewer.

        Returns whether there is room now.
        """
        longest = max(self._queues.values(), key=len, default=None)
        if longest is None or len(longest) <= len(self._queues.get(connection_id, ())) + 1:
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
            flight._is_running = True
            task = self._group.create_task(self._run(flight), context=flight._context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _run(self, flight: Flight[T]) -> None:
        try:
            await flight._run(self._download_timeout_ms)
        finally:
            self._forget(flight)
            self.give_back_slot(flight.size_bytes)

    def _drop(self, flight: Flight[T]) -> None:
        if flight in self._queues.get(flight.connection_id, ()):
            self._remove(flight)
            flight._result.cancel()
            self._admit()

    def _remove(self, flight: Flight[T]) -> None:
        """Removes a queued flight from its queue."""
        queue = self._queues[flight.connection_id]
        queue.remove(flight)
        if not queue:
            del self._queues[flight.connection_id]
        self.pending_count -= 1
        self._forget(flight)

    def _forget(self, flight: Flight[T]) -> None:
        for key in flight.keys:
            if self._flights.get(key) is flight:
                del self._flights[key]
