"""`RemoteReadClient` implements `RemoteReads` over the process that reads the remote tier (`RemoteReadServer`).

* If that process dies, the calls in progress are repeated with the process that takes its place, until their
  deadlines.
* The records of an answer are in shared memory. They are given back when the last view of them is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self, cast

from tiers.errors import RemoteLogError, RemoteReadTimeoutError, RetriableRemoteStorageError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.reader.remote_log_offset_reader import TimestampOffset
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest
from tiers.reader.retry import backoff_ms
from tiers.reader.shared.buffers import AttachedBuffers
from tiers.reader.shared.channel import Address, Channel, close_all, connect, is_of_own_user
from tiers.reader.shared.messages import (
    LEADER_EPOCHS,
    MAX_TIMESTAMP,
    OFFSET_FOR_TIMESTAMP,
    READ,
    Answer,
    Ask,
    Cancel,
    Dropped,
    GiveBack,
    LentRead,
)

logger = logging.getLogger(__name__)

_GRACE_MS = 100
"""The other process knows why a read passed its deadline. It gets this time to say so."""


class ReaderGoneError(RetriableRemoteStorageError):
    """The process that reads the remote tier has ended. The next one can be asked."""


class _Connection:
    """The connection to one life of the other process.

    While records are lent, the connection stays open: its end would tell the other process to use the memory again,
    and a socket of this process may still send from it."""

    def __init__(self, address: Address) -> None:
        """Raises `OSError`, and `RetriableRemoteStorageError` if another user listens."""
        peer = connect(address)
        if not is_of_own_user(peer):
            peer.close()
            raise RetriableRemoteStorageError("a process of another user listens in place of the remote reader")
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._numbers = itertools.count(1)
        self._buffers = AttachedBuffers(self._on_unused)
        self._unused: deque[int] = deque()
        self._loans = 0
        self._is_ending = False
        self.is_lost = False
        self._channel = Channel(peer, self._on_message, self._on_lost, self._abandon)

    async def ask(self, method: str, arguments: tuple[object, ...], keywords: dict[str, object]) -> object:
        number = next(self._numbers)
        answer = self._pending[number] = self._loop.create_future()
        self._channel.send(Ask(number, method, arguments, keywords))
        try:
            return await answer
        except asyncio.CancelledError:
            self._channel.send(Cancel(number))
            raise
        finally:
            del self._pending[number]

    def close(self) -> None:
        """Closes the connection when nothing is lent."""
        self._is_ending = True
        if not self._loans:
            self._channel.close()
            self._fail_pending()

    def _abandon(self) -> None:
        """Asks nothing more here. The end of the connection gives back what the cut message lent."""
        self.is_lost = True
        self._fail_pending()
        self.close()

    def _on_message(self, message: object, fds: list[int]) -> None:
        match message:
            case Answer(number, result, error):
                if isinstance(result, LentRead):
                    try:
                        result = self._read(result, fds)
                    except (OSError, KeyError):  # a buffer cannot be mapped here, or could not be before
                        logger.exception("records of the remote reader cannot be mapped")
                        self._abandon()
                        return
                answer = self._pending.get(number)
                if answer is not None and not answer.done():
                    if error is None:
                        answer.set_result(result)
                    else:
                        answer.set_exception(error)
            case Dropped(buffer):
                self._buffers.forget(buffer)

    def _read(self, lent: LentRead, fds: list[int]) -> RemoteRead:
        try:
            for number, fd in zip(lent.new_buffers, fds, strict=True):
                self._buffers.attach(number, fd)
        finally:
            close_all(fds)
        records = []
        for part in lent.records:
            if isinstance(part, bytes):
                records.append(memoryview(part))
            else:
                records.append(self._buffers.view(part.buffer, part.start, part.size_bytes))
                self._loans += 1  # only now: without a view, nothing ends the loan here
        return RemoteRead(
            records,
            lent.size_bytes,
            lent.first_offset,
            lent.next_offset,
            lent.aborted_transactions,
            lent.segment_id,
            lent.is_cache_hit,
        )

    def _on_unused(self, buffer: int) -> None:
        # Each call asks for a turn of its own. A thread cannot know whether the turn in progress still sees its buffer.
        self._unused.append(buffer)
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give_back)

    def _give_back(self) -> None:
        buffers: list[int] = []
        while self._unused:
            buffers.append(self._unused.popleft())
        if not buffers:
            return  # an earlier turn has given them back
        self._loans -= len(buffers)
        self._channel.send(GiveBack(tuple(buffers)))
        if self._is_ending and not self._loans:
            self._channel.close()

    def _on_lost(self) -> None:
        self.is_lost = True
        self._fail_pending()

    def _fail_pending(self) -> None:
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(ReaderGoneError("the process that reads the remote tier has ended"))


class RemoteReadClient:
    """An asynchronous context manager. `address` is the listener's name. `clock_ms` is the monotonic clock of both."""

    def __init__(
        self,
        address: Address,
        clock_ms: Callable[[], int],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._address = address
        self._clock_ms = clock_ms
        self._jitter = jitter
        self._connection: _Connection | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    @property
    def offsets(self) -> RemoteReadClient:
        return self

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        return cast(RemoteRead, await self._ask(READ, request.deadline_ms, (request,), {}))

    async def leader_epochs(
        self, partition: TopicIdPartition, *, deadline_ms: int, connection_id: int
    ) -> tuple[LeaderEpochEntry, ...]:
        found = await self._ask(LEADER_EPOCHS, deadline_ms, (partition,), _keywords(deadline_ms, connection_id))
        return cast(tuple[LeaderEpochEntry, ...], found)

    async def offset_for_timestamp(
        self,
        partition: TopicIdPartition,
        timestamp_ms: int,
        from_offset: int,
        to_offset: int,
        *,
        deadline_ms: int,
        connection_id: int,
    ) -> TimestampOffset | None:
        asked = (partition, timestamp_ms, from_offset, to_offset)
        found = await self._ask(OFFSET_FOR_TIMESTAMP, deadline_ms, asked, _keywords(deadline_ms, connection_id))
        return cast(TimestampOffset | None, found)

    async def max_timestamp(
        self, partition: TopicIdPartition, from_offset: int, to_offset: int, *, deadline_ms: int, connection_id: int
    ) -> TimestampOffset | None:
        asked = (partition, from_offset, to_offset)
        found = await self._ask(MAX_TIMESTAMP, deadline_ms, asked, _keywords(deadline_ms, connection_id))
        return cast(TimestampOffset | None, found)

    async def _ask(
        self, method: str, deadline_ms: int, arguments: tuple[object, ...], keywords: dict[str, object]
    ) -> object:
        failures = 0
        cause: Exception | None = None
        while (left_ms := deadline_ms - self._clock_ms()) > 0:
            try:
                async with asyncio.timeout((left_ms + _GRACE_MS) / 1000):
                    return await self._connected().ask(method, arguments, keywords)
            except TimeoutError:
                break
            except (ReaderGoneError, OSError) as error:
                cause = error
            failures += 1
            await asyncio.sleep(max(1.0, backoff_ms(failures, deadline_ms - self._clock_ms(), self._jitter)) / 1000)
        raise RemoteReadTimeoutError("the process that reads the remote tier did not answer in time", cause)

    def _connected(self) -> _Connection:
        if self._is_closed:
            raise RemoteLogError("the process stops")
        if self._connection is None or self._connection.is_lost:
            self._connection = _Connection(self._address)
        return self._connection


def _keywords(deadline_ms: int, connection_id: int) -> dict[str, object]:
    return {"deadline_ms": deadline_ms, "connection_id": connection_id}
