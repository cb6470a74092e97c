"""`DelayedRemoteFetch`: a Fetch that waits for the remote reads of its partitions (semantics 3.6, DESIGN "Flow 1").

It ends when every read has ended; or as soon as the local partitions have min.bytes, for a slow remote tier must not
hold local data back; or, once max.wait has passed, as soon as both tiers together have min.bytes; or at its deadline.
What failed is held until the deadline: clients have no backoff of their own per partition, and would ask in a hot loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from proxy.handlers.base import Spawn
from proxy.purgatory import Completion, DelayedOperation
from tiers.errors import RemoteLogError
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteRead

logger = logging.getLogger(__name__)

_LINGER_S = 5.0


class RemotePartitionRead:
    """The remote read of one partition of one request; begins when it is made, ends with a result or an error."""

    def __init__(
        self,
        reader: RemoteLogReader,
        spawn: Spawn,
        partition: TopicIdPartition,
        offset: int,
        *,
        max_bytes: int,
        min_one_message: bool,
        isolation_level: int,
        deadline_ms: int,
        connection_id: int,
        client_id: str,
        log_start_offset: int | None = None,
    ) -> None:
        """Begins the read, if the budget allows any bytes.

        `log_start_offset` is the log start that the leader confirms, 0 if the leader confirms none. None: the leader
        was not asked, and the highest recorded log start applies."""
        self.partition = partition
        self.offset = offset
        self.max_bytes = max_bytes
        self._asked = (partition, offset, max_bytes, min_one_message, isolation_level)
        self.result: RemoteRead | None = None
        self.error: RemoteLogError | None = None
        self.on_done: Callable[[], object] = _nothing
        self._task: asyncio.Task[None] | None = None
        self._lapse: asyncio.TimerHandle | None = None
        if max_bytes > 0 or min_one_message:
            self._task = spawn(
                self._run(
                    reader, min_one_message, isolation_level, deadline_ms, connection_id, client_id, log_start_offset
                ),
            )
            self._task.add_done_callback(self._done)

    @property
    def has_budget(self) -> bool:
        """Whether it may bring anything at all."""
        return self._task is not None

    @property
    def is_done(self) -> bool:
        return self._task is None or self._task.done()

    @property
    def size_bytes(self) -> int:
        return 0 if self.result is None else self.result.size_bytes

    def answers(
        self, partition: TopicIdPartition, offset: int, max_bytes: int, min_one_message: bool, isolation_level: int
    ) -> bool:
        """Whether it is done, and is what a request for just that asks for."""
        return self.result is not None and self._asked == (
            partition,
            offset,
            max_bytes,
            min_one_message,
            isolation_level,
        )

    def linger(self, lapse: Callable[[], object]) -> None:
        """Its request was answered without it. `lapse` is called when no other has taken it over for a while."""
        self._lapse = asyncio.get_running_loop().call_later(_LINGER_S, lapse)

    def take_over(self) -> None:
        if self._lapse is not None:
            self._lapse.cancel()
            self._lapse = None

    def cancel(self) -> None:
        """Nobody waits for it any more. What is being downloaded goes on, into the cache."""
        if self._task is not None:
            self._task.cancel()

    async def _run(
        self,
        reader: RemoteLogReader,
        min_one_message: bool,
        isolation_level: int,
        deadline_ms: int,
        connection_id: int,
        client_id: str,
        log_start_offset: int | None,
    ) -> None:
        try:
            self.result = await reader.read(
                self.partition,
                self.offset,
                self.max_bytes,
                min_one_message=min_one_message,
                isolation_level=isolation_level,
                deadline_ms=deadline_ms,
                connection_id=connection_id,
                client_id=client_id,
                log_start_offset=log_start_offset,
            )
        except RemoteLogError as error:
            self.error = error
            logger.info(
                "remote read failed: %s", error, extra={"partition": str(self.partition), "offset": self.offset}
            )
        except Exception as error:  # a defect must cost this partition, not the server's task group
            self.error = RemoteLogError(f"remote read failed: {error!r}")
            logger.exception("remote read failed", extra={"partition": str(self.partition), "offset": self.offset})

    def _done(self, task: asyncio.Task[None]) -> None:
        self.on_done()


def _nothing() -> None:
    return


class DelayedRemoteFetch(DelayedOperation):
    """`local_bytes` and `must_answer` follow what the broker answers meanwhile: call `try_complete` after a change."""

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
        """Something else of the answer cannot wait: an error or a divergence that the broker reported."""
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
        """A read that is under way goes on for the client's next request, unless the client is gone."""
        if completion is Completion.CANCELLED:
            for read in self.reads:
                read.cancel()
