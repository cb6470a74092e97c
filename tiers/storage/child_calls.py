"""`ChildCalls` runs the operations of a store in a child process, because its library may block a whole process.

* pyarrow holds the interpreter's lock while Google Cloud Storage does not answer. hdfs-native waits for a silent
  connection as long as the kernel keeps it. Neither can be interrupted, but a process can be killed.
* A call ends when it makes no progress for the time of its deadline. The child tells the parent of its progress.
* If a call passes its deadline, its child is retired. A retired child takes no new calls, and the next call starts
  another child. The retired child ends with the last of its calls, each of which has a deadline.
* The library keeps the credentials that it read first, and a newer child reads them again. So a call that the store
  refuses is repeated in a newer child. Once such a call succeeds there, the newer child takes all new calls, and the
  former one is retired. The store may also refuse a call for another reason, such as a missing right. Then the former
  child stays, and its other calls go on.
* There are at most `MAX_RETIRED` retired children with calls. Before a deadline retires one more, the oldest is killed,
  and its calls fail. Refused credentials kill no child. Without room for one more, the former child stays beside the
  newer one.
* The parent tells a child about each abandoned call, so that the child can undo it. If a child has not ended `grace_s`
  after the parent closed its connection, the parent kills it.
* The messages between the two are pickles, each after its length. Pickle is safe here: both ends of the socket pair are
  this program, and no other process has access to it.
* The child ends when the parent closes the connection or dies. Before it ends, it cancels the running calls and gives
  them time to undo what they have begun. It ignores signals, because the parent handles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tiers.errors import CredentialsRefusedError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.activity import Activity, while_active
from tiers.storage.file_system import ThreadCalls, deadlines_of
from tiers.storage.retries import CredentialsRenewal

logger = logging.getLogger(__name__)

MAX_RETIRED = 2
_START_S = 60.0
_BUFFER_BYTES = 4 << 20
"""The requested size of the socket's buffer; the kernel may grant less. A full buffer costs a context switch."""


class Task(NamedTuple):
    """The first message to the child: what makes the store, its settings, and the time that it has for ending."""

    make: Callable[[Mapping[str, str]], ThreadCalls]
    settings: Mapping[str, str]
    grace_s: float


Request = tuple[int, str, tuple[object, ...]]
"""The number of the request, the operation and its arguments."""
Answer = tuple[int, object, Exception | None]
"""The number of the request, the result, and the error or None."""
Moved = tuple[int]
"""The number of a request that makes progress."""

_OPEN = "open"
"""The operation that connects. The child connects before each other one, too, unless it has."""
_CANCEL = "cancel"
"""The operation of a request that cancels the request with the same number. Neither of the two gets an answer."""
_READY = -1
"""The number of the first answer, by which the child reports that it reads requests."""
_LENGTH = struct.Struct(">Q")


def frame_of(said: object) -> bytes:
    body = pickle.dumps(said, protocol=5)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Collects bytes as they arrive and yields the complete messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that `data` completes. The caller must exhaust the iterator."""
        self._bytes += data
        position = 0
        while len(self._bytes) >= position + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, position)
            end = position + _LENGTH.size + length
            if len(self._bytes) < end:
                break
            with memoryview(self._bytes) as view, view[position + _LENGTH.size : end] as body:
                said = pickle.loads(body)
            yield said
            position = end
        del self._bytes[:position]


class ChildCalls:
    """The child imports `make` by its name. This process calls `make` only to check the settings."""

    def __init__(
        self, make: Callable[[Mapping[str, str]], ThreadCalls], settings: Mapping[str, str], grace_s: float = 5.0
    ) -> None:
        made = make(settings)
        self.files = made.files
        self.cluster_id = made.cluster_id
        self._task = Task(make, dict(settings), grace_s)
        self._name = made.files.name
        self._timeout_s = made.timeout_s or _START_S
        self._children: list[_Child] = []
        """From the oldest to the newest one. The first one that is not retired takes the calls. The next one has newer
        credentials, which the store has not accepted yet."""
        self._starting = asyncio.Lock()
        self._is_open = False
        self._renewal = CredentialsRenewal(self._read_credentials_again)

    async def open(self) -> None:
        self._is_open = True
        try:
            await self._run(_OPEN, (), max(self._timeout_s, _START_S))
        except BaseException:
            await self.close()
            raise

    async def run(self, operation: str, *arguments: object) -> Any:
        return await self._run(operation, arguments, self._timeout_s * deadlines_of(operation))

    async def close(self) -> None:
        async with self._starting:
            self._is_open = False
        for child in self._children:
            child.hang_up()
        for child in self._children:
            await child.ended()
        self._children.clear()

    @property
    def processes(self) -> list[int]:
        """The process ids of the children that have not ended, from the oldest to the newest."""
        return [child.pid for child in self._children if child.is_alive()]

    @property
    def _in_use(self) -> list[_Child]:
        return [child for child in self._children if not child.is_retired]

    async def _run(self, operation: str, arguments: tuple[object, ...], timeout_s: float) -> Any:
        async def attempt() -> Any:
            try:
                return await self._run_in(None, operation, arguments, timeout_s)
            except CredentialsRefusedError:
                if len(self._in_use) < 2:
                    raise
                newer = self._in_use[1]
            result = await self._run_in(newer, operation, arguments, timeout_s)
            if newer in self._in_use[1:] and self._has_room(former := self._in_use[0]):
                self._retire(former, "the store refused the credentials")
            return result

        return await self._renewal.tried(attempt)

    async def _read_credentials_again(self) -> None:
        self._task.make(self._task.settings)  # a file with a secret may be missing now
        async with self._starting:
            if not self._is_open:
                raise ValueError(f"{self._name} is not open")
            for newer in self._in_use[1:]:
                if not self._has_room(newer):
                    raise ValueError(f"{self._name}: too many of its processes have calls")
                self._retire(newer, "its credentials are not the newest")
            await self._start()

    async def _run_in(
        self, child: _Child | None, operation: str, arguments: tuple[object, ...], timeout_s: float
    ) -> Any:
        """Asks `child`, or the one that takes the calls."""
        was_ready = False
        try:
            async with while_active(timeout_s) as activity:
                child = child or await self._in_service()
                was_ready = child.is_ready
                return await child.run(operation, arguments, activity)
        except TimeoutError as error:
            if child is not None and was_ready and not child.is_retired:
                retired = [one for one in self._children if one.is_retired and one.is_alive()]
                while len(retired) >= MAX_RETIRED:
                    oldest = min(retired, key=lambda one: one.is_busy)  # of those without calls, if there are any
                    retired.remove(oldest)
                    oldest.kill()
                self._retire(child, "a call passed its deadline")
            raise RetriableRemoteStorageError(f"{self._name}: no progress in {timeout_s} s") from error

    async def _in_service(self) -> _Child:
        async with self._starting:
            if not self._is_open:
                raise RuntimeError(f"{self._name} is not open")
            if not self._in_use:
                await self._start()
            return self._in_use[0]

    def _has_room(self, child: _Child) -> bool:
        """Returns whether one more child may be retired."""
        busy = [one for one in self._children if one.is_retired and one.is_alive() and one.is_busy]
        return not child.is_busy or len(busy) < MAX_RETIRED

    def _retire(self, child: _Child, reason: str) -> None:
        logger.warning("replacing the child process of a store", extra={"store": self._name, "reason": reason})
        child.retire()

    async def _start(self) -> None:
        """Starts one more child."""
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        with theirs:
            process = _spawn(theirs.fileno())
        loop = asyncio.get_running_loop()
        try:
            transport, child = await loop.create_unix_connection(
                lambda: _Child(self._name, process, self._task.grace_s), sock=ours
            )
        except BaseException:
            ours.close()
            process.kill()
            process.wait()
            raise
        transport.write(frame_of(self._task))
        self._children = [*(one for one in self._children if one.is_alive()), child]


class _Child(asyncio.Protocol):
    """One child process and its pending calls."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], grace_s: float) -> None:
        self._name = name
        self._grace_s = grace_s
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer()
        self._pending: dict[int, tuple[asyncio.Future[object], Activity]] = {}
        self._next = 0
        self._transport: asyncio.Transport
        self._is_lost = False
        self.is_ready = False
        self.is_retired = False
        self._start_deadline = self._loop.call_later(_START_S, self.kill)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_busy(self) -> bool:
        return bool(self._pending)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def run(self, operation: str, arguments: tuple[object, ...], activity: Activity) -> object:
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[object] = self._loop.create_future()
        self._pending[number] = future, activity
        try:
            self._send((number, operation, arguments))
            return await future
        except asyncio.CancelledError:
            self._send((number, _CANCEL, ()))
            raise
        finally:
            del self._pending[number]
            if self.is_retired:
                self.retire()

    def retire(self) -> None:
        self.is_retired = True
        if not self._pending:
            self.hang_up()

    def hang_up(self) -> None:
        """Closes the connection. The child undoes its abandoned calls and ends; after `grace_s` it is killed."""
        self.is_retired = True
        if not self._is_lost:
            self._is_lost = True
            self._start_deadline.cancel()
            self._transport.close()
            self._loop.call_later(self._grace_s, self.kill)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    async def ended(self) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, self._grace_s)
        self.kill()

    def _send(self, request: Request) -> None:
        if not self._is_lost:
            self._transport.write(frame_of(request))
        elif request[1] != _CANCEL:
            raise RetriableRemoteStorageError(f"{self._name}: the store's child process has ended")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are not subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        for number, *rest in self._frames.feed(data):
            if number == _READY:
                self.is_ready = True
                self._start_deadline.cancel()
            elif number in self._pending:
                future, activity = self._pending[number]
                if not rest:
                    activity.moved()
                elif not future.done():
                    result, error = rest
                    if error is None:
                        future.set_result(result)
                    else:
                        future.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.hang_up()
        for future, _ in self._pending.values():
            if not future.done():
                future.set_exception(RetriableRemoteStorageError(f"{self._name}: the store's child process has ended"))


def _spawn(channel: int) -> subprocess.Popen[bytes]:
    # `-P` keeps the working directory out of the module search path, so it cannot shadow the project's modules.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    command = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve({channel})"]
    return subprocess.Popen(command, env=environment, pass_fds=[channel], stdin=subprocess.DEVNULL)


def serve(channel: int) -> None:
    """Is the child process. `channel` is the descriptor of its end of the connection."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(socket.socket(fileno=channel)))
    os._exit(0)  # threads that hang in the library must not delay the end


async def _serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel)

    async def received() -> Any:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return pickle.loads(await reader.readexactly(length))

    task: Task = await received()
    calls = task.make(task.settings)
    calls.timeout_s = None
    opening, is_open = asyncio.Lock(), False

    async def answer(number: int, operation: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_open
        moved: Moved = (number,)
        try:
            async with opening:  # the parent sends `_OPEN` only once, but may start several children
                if not is_open:
                    await calls.open()
                    is_open = True
            result: object = None
            if operation != _OPEN:
                async with while_active(None, lambda: writer.write(frame_of(moved))):
                    result = await calls.run(operation, *arguments)
            said: Answer = (number, pickle.PickleBuffer(result) if isinstance(result, memoryview) else result, None)
        except Exception as error:
            is_known = isinstance(error, RemoteStorageError | ValueError)
            said = (number, None, error if is_known else RemoteStorageError(repr(error)))
        writer.write(frame_of(said))

    writer.write(frame_of((_READY, None, None)))
    async with asyncio.TaskGroup() as group:
        running: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                number, operation, arguments = await received()
                if operation == _CANCEL:
                    if number in running:
                        running[number].cancel()
                    continue
                one = running[number] = group.create_task(answer(number, operation, arguments))
                one.add_done_callback(lambda _, number=number: running.pop(number))  # type: ignore[misc]
        except (asyncio.IncompleteReadError, OSError):
            for one in running.values():
                one.cancel()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(task.grace_s * 0.8):
            while calls.abandoned:  # noqa: ASYNC110  # threads end without an event
                await asyncio.sleep(0.01)
