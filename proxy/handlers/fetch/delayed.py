"""`DelayedRemoteFetch`: a Fetch that waits for the remote reads of its partitions, in the purgatory.

See docs/semantics.md 3.6; docs/design.md, "Fetch".

The Fetch is answered as soon as one of these conditions holds:

* The broker has reported something that cannot wait, such as an error.
* Every read has ended, and there are records. If there are no records, the Fetch also waits for max.wait. If there are
  no records and a read has failed, it waits for the deadline: clients have no backoff per partition, and would retry in
  a hot loop.
* The local partitions have min.bytes: a slow remote tier must not delay local data.
* max.wait has passed, and both tiers together have min.bytes.
* The deadline has passed. The reads in progress go on, and the client's next request finds them.

`WaitingReads` has the clients that ask for remote records and get none, for the page. A client asks again and again,
each time for some seconds. So a read counts from the first request without records to the first one with records. It
ends when the client has asked no more for `GONE_AFTER_MS`.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from typing import Final, Protocol

from proxy.wire.exchange import Spawn
from proxy.wire.memory import Grant
from tiers.errors import OffsetBelowLogStartError, OffsetGapError, RemoteLogError, reason_of
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest
from tiers.reader.remote_reads import RemoteReads

logger = logging.getLogger(__name__)

_LINGER_S = 5.0
GONE_AFTER_MS: Final = 15_000
SHOWN_AFTER_MS: Final = 2_000
MAX_SHOWN: Final = 100
_MAX_READS: Final = 10_000
_Key = tuple[str, TopicIdPartition]


class Completion(Enum):
    """How a Fetch's wait ended: by its condition, by its deadline, or because the client went away."""

    SATISFIED = "satisfied"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class ReadsRecords(Protocol):
    """The part of `RemoteReads` that a Fetch uses."""

    async def read(self, request: RemoteReadRequest) -> RemoteRead: ...


class RemotePartitionRead:
    """The remote read of one partition for one request. It starts at once, and ends with a result or an error."""

    def __init__(self, reader: ReadsRecords, spawn: Spawn, request: RemoteReadRequest) -> None:
        """Starts the read, unless the budget allows no bytes."""
        self.request = request
        self.result: RemoteRead | None = None
        self.error: RemoteLogError | None = None
        self.on_done: Callable[[RemotePartitionRead], object] = _nothing
        self._task: asyncio.Task[None] | None = None
        self._lapse: asyncio.TimerHandle | None = None
        self._grant: Grant | None = None
        if request.max_bytes > 0 or request.min_one_message:
            self._task = spawn(self._run(reader))
            self._task.add_done_callback(self._done)

    @property
    def has_budget(self) -> bool:
        """Whether the byte budget allows any records, so that the read was started."""
        return self._task is not None

    @property
    def is_done(self) -> bool:
        return self._task is None or self._task.done()

    @property
    def size_bytes(self) -> int:
        return 0 if self.result is None else self.result.size_bytes

    def serves(self, request: RemoteReadRequest) -> bool:
        """Returns whether `request` may wait for this read instead of another one. False after an error."""
        return self.error is None and self.request.is_part_of(request)

    def linger(self, grant: Grant, lapse: Callable[[], object]) -> None:
        """Keeps the read after its request was answered without it. The read ends at its own deadline.

        `grant` covers the records until another request takes the read over, or until it is cancelled. `lapse` is
        called if no other request takes it over within 5 seconds."""
        self._grant = grant
        self._lapse = asyncio.get_running_loop().call_later(_LINGER_S, lapse)
        self.on_done = lambda _: grant.resize(self.size_bytes)

    def take_over(self) -> None:
        """Ends the lingering: the records belong to the grant of another request."""
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None
        if self._grant is not None:
            self._grant.release()
            self._grant = None

    def cancel(self) -> None:
        """Stops waiting for the read. A download in progress continues, into the cache."""
        self.take_over()
        if self._task is not None:
            self._task.cancel()

    async def _run(self, reader: ReadsRecords) -> None:
        extra = {"partition": str(self.request.partition), "offset": self.request.offset}
        try:
            self.result = await reader.read(self.request)
        except RemoteLogError as error:
            self.error = error
            logger.info("remote read failed: %s", error, extra=extra)
        except Exception as error:  # a bug must fail this partition alone, not the server's task group
            self.error = RemoteLogError(f"remote read failed: {error!r}")
            logger.exception("remote read failed", extra=extra)

    def _done(self, task: asyncio.Task[None]) -> None:
        self.on_done(self)


def _nothing(_: object) -> None:
    return


class DelayedRemoteFetch:
    """A Fetch that waits for `reads` and for the broker. Times are those of `clock_ms`.

    It counts the reads as they end: a Fetch may have thousands of them. One event wakes it: a read ended, or the owner
    updated `local_bytes` or `must_answer` and called `wake`. It also wakes at the client's max.wait and at the
    deadline."""

    def __init__(
        self,
        reads: Sequence[RemotePartitionRead],
        clock_ms: Callable[[], int],
        *,
        min_bytes: int,
        local_bytes: int,
        must_answer: bool,
        has_unavailable: bool,
        max_wait_at_ms: int,
        deadline_ms: int,
    ) -> None:
        self.reads = list(dict.fromkeys(reads))  # a request may name a partition twice
        self._remote_bytes = 0
        self._has_failed = has_unavailable
        self._left = len(self.reads)
        self._changed = asyncio.Event()
        for read in self.reads:
            if read.is_done:
                self._on_done(read)
            else:
                read.on_done = self._on_done
        self.local_bytes = local_bytes
        self.must_answer = must_answer
        """Whether the broker reported an error or a divergence for another partition, which cannot wait."""
        self._min_bytes = max(min_bytes, 1)
        self._clock_ms = clock_ms
        self._max_wait_at_ms = max_wait_at_ms
        self._deadline_ms = deadline_ms

    @property
    def has_expired(self) -> bool:
        return self._clock_ms() >= self._deadline_ms

    def is_satisfied(self) -> bool:
        """Returns whether the Fetch can be answered now. Once true, it stays true."""
        if self.must_answer:
            return True
        has_waited = self._clock_ms() >= self._max_wait_at_ms
        total_bytes = self.local_bytes + self._remote_bytes
        if not self._left:
            return total_bytes > 0 or (not self._has_failed and has_waited)
        return self.local_bytes >= self._min_bytes or (total_bytes >= self._min_bytes and has_waited)

    def wake(self) -> None:
        self._changed.set()

    def _on_done(self, read: RemotePartitionRead) -> None:
        self._left -= 1
        self._remote_bytes += read.size_bytes
        self._has_failed = self._has_failed or read.error is not None
        self._changed.set()

    def close(self) -> None:
        """Ends the counting. A slow read outlives the Fetch, and must not keep the records of the other reads."""
        for read in self.reads:
            read.on_done = _nothing

    async def wait(self) -> Completion:
        """Waits until the Fetch is satisfied or the deadline passes."""
        while not self.is_satisfied():
            now_ms = self._clock_ms()
            ends_at_deadline = not now_ms < self._max_wait_at_ms < self._deadline_ms
            until_ms = self._deadline_ms if ends_at_deadline else self._max_wait_at_ms
            try:
                async with asyncio.timeout((until_ms - now_ms) / 1000):
                    await self._changed.wait()
            except TimeoutError:
                if ends_at_deadline:
                    return Completion.EXPIRED
            self._changed.clear()
        return Completion.SATISFIED


class DelayedRemoteFetchPurgatory:
    """The Fetches that wait (docs/semantics.md 12). Each completes exactly once, and keeps no records afterwards.

    There are no watcher lists, locks or reaper as in Kafka, because only a Fetch's own reads and its own poll can
    complete it, and all of them run on one event loop."""

    def __init__(self) -> None:
        self.pending_count = 0
        self.completed: Counter[Completion] = Counter()

    async def wait(self, fetch: DelayedRemoteFetch, poll: Callable[[], Coroutine[None, None, None]]) -> Completion:
        """Waits until `fetch` completes, and returns how. `poll` runs meanwhile, and is cancelled then.

        If the caller is cancelled because its client is gone, so are the reads. Otherwise the reads in progress
        continue for the client's next request."""
        completion = Completion.CANCELLED
        self.pending_count += 1
        try:
            if fetch.is_satisfied():
                completion = Completion.SATISFIED
            elif fetch.has_expired:
                completion = Completion.EXPIRED
            else:
                async with asyncio.TaskGroup() as group:
                    polling = group.create_task(poll())
                    completion = await fetch.wait()
                    polling.cancel()
        finally:
            fetch.close()
            self.pending_count -= 1
            self.completed[completion] += 1
            if completion is Completion.CANCELLED:
                for read in fetch.reads:
                    read.cancel()
        return completion


@dataclass(slots=True)
class WaitingSince:
    """`asked_ms` is the time of the last request. `reads` are those in progress. Times are monotonic."""

    client_id: str
    partition: TopicIdPartition
    offset: int
    since_ms: int
    asked_ms: int
    reason: str = ""
    reads: int = 0


class WaitingReads:
    """The remote reads of the Fetches of one process."""

    def __init__(self, reader: RemoteReads, clock_ms: Callable[[], int]) -> None:
        self._reader = reader
        self._clock_ms = clock_ms
        self._waiting: dict[_Key, WaitingSince] = {}

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        """Reads as `RemoteReads` does, and notes whether there were records."""
        key = request.client_id, request.partition
        waiting = self.asked(request.client_id, request.partition, request.offset)
        waiting.reads += 1
        try:
            found = await self._reader.read(request)
        except (OffsetBelowLogStartError, OffsetGapError):
            self._waiting.pop(key, None)
            raise
        except asyncio.CancelledError:
            if not waiting.reason:  # the broker had the records, or the client left
                self._waiting.pop(key, None)
            raise
        except RemoteLogError as error:
            waiting.reason = reason_of(getattr(error, "cause", None) or error)
            waiting.asked_ms = self._clock_ms()
            raise
        finally:
            waiting.reads -= 1
        self._waiting.pop(key, None)
        return found

    def asked(self, client_id: str, partition: TopicIdPartition, offset: int, reason: str = "") -> WaitingSince:
        """Notes a request without records so far. `reason` says why, if it is known."""
        key, now_ms = (client_id, partition), self._clock_ms()
        waiting = self._waiting.get(key)
        if waiting is None or self._is_over(waiting, now_ms):
            self._waiting.pop(key, None)  # the last to begin is the last in the order
            if len(self._waiting) >= _MAX_READS:
                del self._waiting[next(iter(self._waiting))]
            waiting = self._waiting[key] = WaitingSince(client_id, partition, offset, now_ms, now_ms)
        waiting.offset, waiting.asked_ms, waiting.reason = offset, now_ms, reason or waiting.reason
        return waiting

    @staticmethod
    def _is_over(waiting: WaitingSince, now_ms: int) -> bool:
        return not waiting.reads and now_ms - waiting.asked_ms > GONE_AFTER_MS

    def now(self) -> Iterator[tuple[WaitingSince, int]]:
        """Yields those that wait now, each with the time for which it has waited, the longest first.

        A client that asked once, and went on with other records, does not wait."""
        now_ms = self._clock_ms()
        self._waiting = {key: each for key, each in self._waiting.items() if not self._is_over(each, now_ms)}
        shown = (
            each
            for each in self._waiting.values()
            if (now_ms if each.reads else each.asked_ms) - each.since_ms >= SHOWN_AFTER_MS
        )
        for each in islice(shown, MAX_SHOWN):
            yield each, now_ms - each.since_ms
