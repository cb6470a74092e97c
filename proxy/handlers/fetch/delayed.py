"""`DelayedRemoteFetch`: a Fetch that waits for the remote reads of its partitions.

See docs/semantics.md 3.6; docs/design.md, "Fetch".

The Fetch is answered as soon as one of these conditions holds:

* The broker has reported something that cannot wait, such as an error.
* Every read has ended, and there are records. If there are no records, the Fetch also waits for max.wait. If there are
  no records and a read has failed, it waits for the deadline: clients have no backoff per partition, and would retry in
  a hot loop.
* The local partitions have min.bytes: a slow remote tier must not delay local data.
* max.wait has passed, and both tiers together have min.bytes.
* The deadline has passed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from proxy.handlers.base import Spawn
from proxy.handlers.fetch.purgatory import Completion, DelayedOperation
from tiers.errors import RemoteLogError
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteRead, RemoteReadRequest

logger = logging.getLogger(__name__)

_LINGER_S = 5.0


class RemotePartitionRead:
    """The remote read of one partition for one request. It starts at once, and ends with a result or an error."""

    def __init__(self, reader: RemoteLogReader, spawn: Spawn, request: RemoteReadRequest) -> None:
        """Starts the read, unless the budget allows no bytes."""
        self.request = request
        self.result: RemoteRead | None = None
        self.error: RemoteLogError | None = None
        self.on_done: Callable[[], object] = _nothing
        self._task: asyncio.Task[None] | None = None
        self._lapse: asyncio.TimerHandle | None = None
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

    def answers(self, request: RemoteReadRequest) -> bool:
        """Returns whether the read has a result that `request` may use."""
        return self.result is not None and self.request.asks_for_the_same(request)

    def linger(self, lapse: Callable[[], object]) -> None:
        """Keeps the read after its request was answered without it.

        `lapse` is called if no other request takes the read over within 5 seconds."""
        self._lapse = asyncio.get_running_loop().call_later(_LINGER_S, lapse)

    def take_over(self) -> None:
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None

    def cancel(self) -> None:
        """Stops waiting for the read. A download in progress continues, into the cache."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self, reader: RemoteLogReader) -> None:
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
        self.on_done()


def _nothing() -> None:
    return


class DelayedRemoteFetch(DelayedOperation):
    """A Fetch that waits for `reads`.

    The owner updates `local_bytes` and `must_answer` from the broker's answers, and then calls `try_complete`."""

    def __init__(
        self,
        reads: Sequence[RemotePartitionRead],
        *,
        min_bytes: int,
        local_bytes: int,
        must_answer: bool,
        has_unavailable: bool,
        max_wait_passed: Callable[[], bool],
    ) -> None:
        super().__init__()
        self.reads = reads
        self.local_bytes = local_bytes
        self.must_answer = must_answer
        """Whether the broker reported an error or a divergence for another partition, which cannot wait."""
        self._has_unavailable = has_unavailable
        self._min_bytes = max(min_bytes, 1)
        self._max_wait_passed = max_wait_passed

    def is_satisfied(self) -> bool:
        if self.must_answer:
            return True
        total_bytes = self.local_bytes + sum(read.size_bytes for read in self.reads)
        if all(read.is_done for read in self.reads):
            has_failed = self._has_unavailable or any(read.error is not None for read in self.reads)
            return total_bytes > 0 or (not has_failed and self._max_wait_passed())
        return self.local_bytes >= self._min_bytes or (total_bytes >= self._min_bytes and self._max_wait_passed())

    def on_complete(self, completion: Completion) -> None:
        """Cancels the reads if the client is gone. Otherwise reads in progress continue for its next request."""
        if completion is Completion.CANCELLED:
            for read in self.reads:
                read.cancel()
