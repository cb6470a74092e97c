"""Remote reads of several processes, the borrowers, by one that reads the remote tier (`RemoteReadServer`).

* The records of an answer are lent: the borrower reads them in shared memory, and gives them back when the last view of
  them is gone. Its death ends its calls and its loans. While it lives and has loans, it keeps its connection: the end
  would tell the other process to use memory again that a socket still sends.
* If the process that reads dies, a borrower repeats its calls with the process that takes its place, until their
  deadlines (`RemoteReadClient`).
* The connections of all borrowers have different ids in the reader's pools, so admission is fair across all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import pickle
import socket
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from typing import Any, NamedTuple, Self

from tiers.errors import RemoteLogError, RemoteReadTimeoutError, RetriableRemoteStorageError
from tiers.reader.chunk_fetcher import READ_BACKOFF, Caller
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest
from tiers.reader.remote_reads import RemoteReads
from tiers.reader.shared.channel import (
    MAX_FDS,
    Acceptor,
    Address,
    BorrowedBuffers,
    Channel,
    SharedBuffers,
    close_all,
    connect,
)

logger = logging.getLogger(__name__)

_IDS_OF_A_BORROWER = 1 << 48
"""The connection ids of a borrower are below this."""
_GRACE_MS = 100
"""The process that reads knows why a read passed its deadline. It gets this time to say so."""


class Ask(NamedTuple):
    """Asks for a call of `RemoteReads`. The answer has the same number.

    The last argument is a `RemoteReadRequest` or a `Caller`."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Cancel(NamedTuple):
    """Ends the call with this number. It gets no answer, unless that left before."""

    number: int


class GiveBack(NamedTuple):
    """Ends one loan of each of these buffers."""

    buffers: tuple[int, ...]


class Lent(NamedTuple):
    """Bytes of a shared buffer, lent until they are given back."""

    buffer: int
    start: int
    size_bytes: int


class Answer(NamedTuple):
    """The result or the error of a call. The records of a `RemoteRead` are apart: lent, or in the message.

    The message has the descriptors of `buffers`, in this order."""

    number: int
    result: object = None
    error: Exception | None = None
    records: tuple[Lent | bytes, ...] = ()
    buffers: tuple[int, ...] = ()


class RemoteReadServer:
    """An asynchronous context manager: it serves until it exits. The caller owns `listener`, and closes it later.

    `before_call` is called before each call: the metadata that the borrower has seen must be the reader's too."""

    def __init__(
        self,
        listener: socket.socket,
        reader: RemoteReads,
        buffers: SharedBuffers,
        before_call: Callable[[], object] = lambda: None,
    ) -> None:
        self.reader = reader
        self.buffers = buffers
        self.before_call = before_call
        self.group = asyncio.TaskGroup()
        self.borrowers: dict[int, _Borrower] = {}
        self._acceptor = Acceptor(listener, "records of the remote tier", self._serve)
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        await self.group.__aenter__()
        self._acceptor.open()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._acceptor.close()
        for borrower in self.borrowers.values():
            borrower.close()
        await self.group.__aexit__(None, None, None)

    def _serve(self, peer: socket.socket) -> None:
        number = next(self._numbers)
        self.borrowers[number] = _Borrower(self, number, peer)


class _Borrower:
    """One process that asks, and its calls in progress."""

    def __init__(self, server: RemoteReadServer, number: int, peer: socket.socket) -> None:
        self._server = server
        self._number = number
        self.calls: dict[int, asyncio.Task[None]] = {}
        self.lent: dict[int, list[memoryview]] = {}
        """The views that keep the lent buffers in use."""
        # The borrower of a cut message asks again at its deadline. It lives, so its loans stay.
        self._channel = Channel(peer, self._on_message, self._on_lost, lambda: None)

    def close(self) -> None:
        """Ends the calls. The loans stay: this process ends soon, and the borrower may still send from the memory."""
        self._channel.close()
        for call in self.calls.values():
            call.cancel()

    def _on_lost(self) -> None:
        self.close()
        del self._server.borrowers[self._number]
        self.lent.clear()
        self._server.buffers.collect()

    def _on_message(self, message: object, fds: list[int]) -> None:
        match message:
            case Ask(number):
                call = self.calls[number] = self._server.group.create_task(self._answer(message))
                call.add_done_callback(lambda _: self.calls.pop(number, None))
            case Cancel(number):
                if number in self.calls:
                    self.calls[number].cancel()
            case GiveBack(buffers):
                for buffer in buffers:
                    self.lent[buffer].pop()
                self._server.buffers.collect()

    async def _answer(self, ask: Ask) -> None:
        try:
            self._server.before_call()
            result = await self._call(ask)
        except RemoteLogError as error:
            self._channel.send(Answer(ask.number, error=sendable(error)))
        except Exception as error:  # a defect must fail this call alone, and not the server's task group
            logger.exception("a read for another process failed")
            self._channel.send(Answer(ask.number, error=RemoteLogError(f"remote read failed: {error!r}")))
        else:
            if isinstance(result, RemoteRead):
                self._lend(ask.number, result)
            else:
                self._channel.send(Answer(ask.number, result))

    async def _call(self, ask: Ask) -> object:
        *arguments, caller = ask.arguments
        connection_id = self._number * _IDS_OF_A_BORROWER + caller.connection_id
        method = getattr(self._server.reader, ask.method)
        return await method(*arguments, replace(caller, connection_id=connection_id))

    def _lend(self, number: int, read: RemoteRead) -> None:
        records: list[Lent | bytes] = []
        fds: dict[int, int] = {}
        for view in read.records:
            place = self._server.buffers.place_of(view)
            if place is None or (place.buffer.number not in fds and len(fds) == MAX_FDS):
                records.append(bytes(view))
                continue
            self.lent.setdefault(place.buffer.number, []).append(view)
            fds[place.buffer.number] = place.buffer.fd
            records.append(Lent(place.buffer.number, place.start, len(view)))
        answer = Answer(number, replace(read, records=[]), None, tuple(records), tuple(fds))
        if not self._channel.send(answer, tuple(fds.values())):
            for part in records:
                if isinstance(part, Lent):
                    self.lent[part.buffer].pop()
            self._channel.send(Answer(number, error=RetriableRemoteStorageError("no file descriptor is left to lend")))


class _Connection:
    """The connection of a borrower to one life of the process that reads."""

    def __init__(self, address: Address) -> None:
        """Raises `OSError`; `PermissionError` if another user listens."""
        peer = connect(address)
        self._loop = asyncio.get_running_loop()
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._numbers = itertools.count(1)
        self._buffers = BorrowedBuffers(self._on_unused)
        self._unused: deque[int] = deque()
        self._loans = 0
        self._is_ending = False
        self.is_lost = False
        self._channel = Channel(peer, self._on_message, self._on_lost, self._abandon)

    async def ask(self, method: str, arguments: tuple[object, ...]) -> object:
        number = next(self._numbers)
        answer = self._pending[number] = self._loop.create_future()
        self._channel.send(Ask(number, method, arguments))
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
        self._on_lost()
        self.close()

    def _on_message(self, message: object, fds: list[int]) -> None:
        assert isinstance(message, Answer)
        result = message.result
        if isinstance(result, RemoteRead):
            try:
                result = replace(result, records=self._views(message, fds))
            except OSError:
                logger.exception("records of the remote reader cannot be mapped")
                self._abandon()
                return
        answer = self._pending.get(message.number)
        if answer is not None and not answer.done():
            if message.error is None:
                answer.set_result(result)
            else:
                answer.set_exception(message.error)

    def _views(self, answer: Answer, fds: list[int]) -> list[memoryview]:
        records = []
        try:
            fd_of = dict(zip(answer.buffers, fds, strict=True))
            for part in answer.records:
                if isinstance(part, bytes):
                    records.append(memoryview(part))
                else:
                    records.append(self._buffers.view(part.buffer, fd_of[part.buffer], part.start, part.size_bytes))
                    self._loans += 1  # only now: without a view, nothing ends the loan here
        finally:
            close_all(fds)
        return records

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
                answer.set_exception(ConnectionError("the process that reads the remote tier has ended"))


class RemoteReadClient:
    """Implements `RemoteReads` over a `RemoteReadServer` of another process. An asynchronous context manager.

    `address` is the listener's name. `clock_ms` is the monotonic clock of both."""

    def __init__(self, address: Address, clock_ms: Callable[[], int]) -> None:
        self._address = address
        self._clock_ms = clock_ms
        self._connection: _Connection | None = None
        self._is_closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self._is_closed = True
        if self._connection is not None:
            self._connection.close()

    async def _ask(self, method: str, *arguments: Any) -> Any:
        caller: RemoteReadRequest | Caller = arguments[-1]
        failures = 0
        cause: Exception | None = None
        while (left_ms := caller.deadline_ms - self._clock_ms()) > 0:
            try:
                async with asyncio.timeout((left_ms + _GRACE_MS) / 1000):
                    return await self._connected().ask(method, arguments)
            except TimeoutError:
                break
            except PermissionError as error:
                text = "a process of another user listens in place of the remote reader"
                raise RetriableRemoteStorageError(text) from error
            except OSError as error:
                cause = error
            failures += 1
            pause_ms = min(READ_BACKOFF.pause_ms(failures), (caller.deadline_ms - self._clock_ms()) / 2)
            await asyncio.sleep(max(1.0, pause_ms) / 1000)
        raise RemoteReadTimeoutError("the process that reads the remote tier did not answer in time", cause)

    read = partialmethod(_ask, "read")
    leader_epochs = partialmethod(_ask, "leader_epochs")
    offset_for_timestamp = partialmethod(_ask, "offset_for_timestamp")
    max_timestamp = partialmethod(_ask, "max_timestamp")

    def _connected(self) -> _Connection:
        if self._is_closed:
            raise RemoteLogError("the process stops")
        if self._connection is None or self._connection.is_lost:
            self._connection = _Connection(self._address)
        return self._connection


def sendable(error: Exception) -> Exception:
    """Returns the error, or one that says the same if it holds objects of a library that cannot be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        said = RemoteLogError(str(error) if isinstance(error, RemoteLogError) else f"the call failed: {error!r}")
        if isinstance(error, RemoteReadTimeoutError):
            said = RemoteReadTimeoutError(str(error), RemoteLogError(repr(error.cause)))
        said.retriable = isinstance(error, RemoteLogError) and error.retriable
        return said
    return error
