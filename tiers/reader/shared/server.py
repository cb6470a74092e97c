"""`RemoteReadServer`: one `RemoteLogReader` that answers several processes, the borrowers.

* The records of an answer are lent: the borrower reads them in shared memory, and gives them back when they are sent.
* A borrower's death ends its calls and its loans. A borrower that lives keeps its connection while it has loans.
* The connections of all borrowers have different ids in the reader's pools, so admission is fair across all of them.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from tiers.errors import RemoteLogError
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest
from tiers.reader.remote_reads import RemoteReads
from tiers.reader.shared import messages
from tiers.reader.shared.buffers import SharedBuffers
from tiers.reader.shared.channel import MAX_FDS, Channel, is_of_own_user
from tiers.reader.shared.messages import (
    READ,
    Answer,
    Ask,
    Cancel,
    Dropped,
    GiveBack,
    Lent,
    LentRead,
    sendable,
)

logger = logging.getLogger(__name__)

_IDS_OF_A_BORROWER = 1 << 48
"""The connection ids of a borrower are below this."""
_RETRY_S = 1.0
"""The pause after a failed accept, for example if the process has no file descriptor left."""


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
        self._listener = listener
        self._reader = reader
        self._buffers = buffers
        self._before_call = before_call
        self._numbers = itertools.count(1)
        self._borrowers: dict[int, _Borrower] = {}
        self._group: asyncio.TaskGroup | None = None
        self._again: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> Self:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._listener.setblocking(False)
        asyncio.get_running_loop().add_reader(self._listener.fileno(), self._accept)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._again is not None:
            self._again.cancel()
        asyncio.get_running_loop().remove_reader(self._listener.fileno())
        for borrower in list(self._borrowers.values()):
            borrower.close()
        group, self._group = self._group, None
        if group is not None:
            await group.__aexit__(None, None, None)

    @property
    def borrower_count(self) -> int:
        return len(self._borrowers)

    def on_dropped(self, buffer: int) -> None:
        """Tells the borrowers that a buffer is used no more."""
        for borrower in self._borrowers.values():
            borrower.on_dropped(buffer)

    def _accept(self) -> None:
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionError):
            return
        except OSError as error:
            logger.error("a process of the proxy cannot connect, trying again: %s", error.strerror or error)
            loop, fd = asyncio.get_running_loop(), self._listener.fileno()
            loop.remove_reader(fd)
            self._again = loop.call_later(_RETRY_S, loop.add_reader, fd, self._accept)
            return
        if not is_of_own_user(peer):
            logger.warning("a process of another user is refused: it asked for records of the remote tier")
            peer.close()
            return
        number = next(self._numbers)
        self._borrowers[number] = _Borrower(
            number, peer, self._reader, self._buffers, self._before_call, self._spawn, self._forget
        )

    def _spawn(self, call: Any) -> asyncio.Task[None]:
        assert self._group is not None
        return self._group.create_task(call)

    def _forget(self, number: int) -> None:
        del self._borrowers[number]


class _Borrower:
    """One process that asks, and its calls in progress."""

    def __init__(
        self,
        number: int,
        peer: socket.socket,
        reader: RemoteReads,
        buffers: SharedBuffers,
        before_call: Callable[[], object],
        spawn: Callable[[Any], asyncio.Task[None]],
        on_gone: Callable[[int], None],
    ) -> None:
        self._number = number
        self._reader = reader
        self._buffers = buffers
        self._before_call = before_call
        self._spawn = spawn
        self._on_gone = on_gone
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._known: set[int] = set()
        """The buffers whose descriptors the borrower has."""
        self._channel = Channel(peer, self._on_message, self._on_lost, lambda: None)
        # The borrower of a cut message asks again at its deadline. It lives, so its loans stay.

    def close(self) -> None:
        """Ends the calls. The loans stay: this process ends soon, and the borrower may still send from the memory."""
        self._channel.close()
        self._end()

    def on_dropped(self, buffer: int) -> None:
        if buffer in self._known:
            self._known.discard(buffer)
            self._channel.send(Dropped(buffer))

    def _on_lost(self) -> None:
        self._end()
        self._buffers.give_back_all(self._number)

    def _end(self) -> None:
        for call in self._calls.values():
            call.cancel()
        self._on_gone(self._number)

    def _on_message(self, message: object, fds: list[int]) -> None:
        match message:
            case Ask():
                call = self._spawn(self._answer(message))
                self._calls[message.number] = call
                call.add_done_callback(lambda _: self._calls.pop(message.number, None))
            case Cancel(number):
                if number in self._calls:
                    self._calls[number].cancel()
            case GiveBack(buffers):
                for buffer in buffers:
                    self._buffers.give_back(buffer, self._number)

    async def _answer(self, ask: Ask) -> None:
        result: object = None
        error: RemoteLogError | None = None
        try:
            self._before_call()
            result = await self._call(ask)
        except RemoteLogError as raised:
            error = sendable(raised)
        except Exception as raised:  # a defect must fail this call alone, and not the server's task group
            logger.exception("a read for another process failed")
            error = RemoteLogError(f"remote read failed: {raised!r}")
        if isinstance(result, RemoteRead):
            self._lend(ask.number, result)
        else:
            self._channel.send(Answer(ask.number, result, error))

    async def _call(self, ask: Ask) -> object:
        reader, keywords = self._reader, ask.keywords
        if ask.method == READ:
            (request,) = ask.arguments
            assert isinstance(request, RemoteReadRequest)
            return await reader.read(replace(request, connection_id=self._id_of(request.connection_id)))
        arguments: Any = ask.arguments
        more: Any = {**keywords, "connection_id": self._id_of(keywords["connection_id"])}
        match ask.method:
            case messages.LEADER_EPOCHS:
                return await reader.leader_epochs(*arguments, **more)
            case messages.OFFSET_FOR_TIMESTAMP:
                return await reader.offsets.offset_for_timestamp(*arguments, **more)
            case messages.MAX_TIMESTAMP:
                return await reader.offsets.max_timestamp(*arguments, **more)
        raise RemoteLogError(f"there is no method {ask.method}")

    def _id_of(self, connection_id: Any) -> int:
        return self._number * _IDS_OF_A_BORROWER + int(connection_id)

    def _lend(self, number: int, read: RemoteRead) -> None:
        records: list[Lent | bytes] = []
        new: dict[int, int] = {}
        for view in read.records:
            place = self._buffers.place_of(view)
            if place is None or (place.buffer.number not in self._known | new.keys() and len(new) == MAX_FDS):
                records.append(bytes(view))
                continue
            self._buffers.lend(place.buffer, self._number)
            if place.buffer.number not in self._known:
                new[place.buffer.number] = place.buffer.fd
            records.append(Lent(place.buffer.number, place.start, len(view)))
        self._known |= new.keys()
        lent = LentRead(
            tuple(records),
            tuple(new),
            read.size_bytes,
            read.first_offset,
            read.next_offset,
            read.aborted_transactions,
            read.segment_id,
            read.is_cache_hit,
        )
        self._channel.send(Answer(number, lent, None), tuple(new.values()))
