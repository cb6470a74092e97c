"""`ChildStorageManager` runs a storage manager in a child process, because its library may block a whole process.

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
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiers.errors import CredentialsRefusedError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.activity import Activity, while_active
from tiers.storage.credentials import CredentialsRenewal
from tiers.storage.file_system import DEADLINES_OF_A_LISTING, FileSystemRemoteStorageManager
from tiers.storage.remote_storage_manager import (
    LogSegmentData,
    StoredObject,
    StoreFeatures,
    check_range,
)

logger = logging.getLogger(__name__)

MAX_RETIRED = 2
_START_S = 60.0
_BUFFER_BYTES = 4 << 20
"""The requested size of the socket's buffer; the kernel may grant less. A full buffer costs a context switch."""


@dataclass(frozen=True, slots=True)
class Task:
    """The first message to the child: the storage manager to run, and the time that the child has for ending."""

    make: Callable[[Mapping[str, str]], FileSystemRemoteStorageManager]
    settings: Mapping[str, str]
    grace_s: float


Request = tuple[int, str, tuple[object, ...]]
"""The number of the request, the method and its arguments."""
Answer = tuple[int, object, Exception | None]
"""The number of the request, the result, and the error or None."""

CANCEL = "cancel"
"""The method of a request that cancels the request with the same number. Neither of the two gets an answer."""
Moved = tuple[int]
"""The number of a request that makes progress."""
READY = -1
"""The number of the first answer, by which the child reports that it reads requests."""
LENGTH = struct.Struct(">Q")


def frame_of(said: object) -> bytes:
    body = pickle.dumps(said, protocol=5)
    return LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Collects bytes as they arrive and yields the complete messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Yields the messages that `data` completes. The caller must exhaust the iterator."""
        self._bytes += data
        position = 0
        while len(self._bytes) >= position + LENGTH.size:
            (length,) = LENGTH.unpack_from(self._bytes, position)
            end = position + LENGTH.size + length
            if len(self._bytes) < end:
                break
            with memoryview(self._bytes) as view, view[position + LENGTH.size : end] as body:
                said = pickle.loads(body)
            yield said
            position = end
        del self._bytes[:position]


class ChildStorageManager:
    """A `RemoteStorageManager` in a child process.

    The child imports `make` by its name. This process calls `make` only to check the settings."""

    def __init__(
        self,
        make: Callable[[Mapping[str, str]], FileSystemRemoteStorageManager],
        settings: Mapping[str, str],
        grace_s: float = 5.0,
    ) -> None:
        made = make(settings)
        self._task = Task(make, dict(settings), grace_s)
        self._name = made.name
        self._timeout_s = made.timeout_s or _START_S
        self._child: _Child | None = None
        self._newer: _Child | None = None
        self._retired: list[_Child] = []
        self._starting = asyncio.Lock()
        self._is_open = False
        self._renewal = CredentialsRenewal(self._read_credentials_again)

    async def open(self) -> None:
        self._is_open = True
        try:
            await self._call("open", timeout_s=max(self._timeout_s, _START_S))
        except BaseException:
            await self.close()
            raise

    async def check(self) -> None:
        await self._call("check", timeout_s=3 * self._timeout_s)

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        custom: bytes | None = await self._call("copy_log_segment_data", metadata, data)
        return custom

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        check_range(start_position, end_position)
        return memoryview(await self._call("fetch_log_segment", metadata, start_position, end_position))

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        return bytes(await self._call("fetch_indexes", metadata))

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        return bool(await self._call("delete_log_segment_data", metadata))

    async def probe(self) -> Sequence[StoreFeatures]:
        features: Sequence[StoreFeatures] = await self._call("probe")
        return features

    async def put_object(self, key: str, data: bytes) -> None:
        await self._call("put_object", key, data)

    async def get_object(self, key: str) -> bytes:
        return bytes(await self._call("get_object", key))

    async def delete_object(self, key: str) -> None:
        await self._call("delete_object", key)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        for stored in await self._call("list_objects", prefix, timeout_s=self._timeout_s * DEADLINES_OF_A_LISTING):
            yield stored

    async def close(self) -> None:
        async with self._starting:
            self._is_open = False
            children = self._children
            self._child = self._newer = None
        for child in children:
            child.hang_up()
        for child in children:
            await child.ended()
        self._retired.clear()

    @property
    def processes(self) -> list[int]:
        """The process ids of the children that have not ended; the active one is last."""
        return [child.pid for child in self._children if child.is_alive()]

    @property
    def _children(self) -> list[_Child]:
        known = (*self._retired, self._newer, self._child)  # a retired one may be there twice
        return list(dict.fromkeys(child for child in known if child is not None))

    async def _call(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        timeout_s = timeout_s or self._timeout_s
        try:
            return await self._call_once(None, method, arguments, timeout_s)
        except CredentialsRefusedError as error:
            refusal = error

        async def once_more() -> Any:
            newer = self._newer
            if newer is None or newer.is_retired:
                raise refusal
            result = await self._call_once(newer, method, arguments, timeout_s)
            await self._take_over(newer)
            return result

        return await self._renewal.tried(once_more)

    async def _read_credentials_again(self) -> None:
        self._task.make(self._task.settings)  # a file with a secret may be missing now
        async with self._starting:
            if not self._is_open:
                raise ValueError(f"{self._name} is not open")
            if self._newer is not None and not self._newer.is_retired:
                if self._newer.is_busy and not self._has_room():
                    raise ValueError(f"{self._name}: too many of its processes have calls")
                self._retire(self._newer, "its credentials are not the newest")
            self._newer = await _start(self._name, self._task)

    async def _take_over(self, newer: _Child) -> None:
        """Gives all new calls to `newer`, whose credentials the store has accepted, if there is room for the former."""
        async with self._starting:
            if newer is not self._newer or newer.is_retired:
                return
            if self._child is not None and self._child not in self._retired:
                if self._child.is_busy and not self._has_room():
                    return
                self._retire(self._child, "the store refused the credentials")
            self._child, self._newer = newer, None

    async def _call_once(
        self, child: _Child | None, method: str, arguments: tuple[object, ...], timeout_s: float
    ) -> Any:
        """Asks `child`, or the one that takes the new calls."""
        was_ready = False
        try:
            async with while_active(timeout_s) as activity:
                child = child or await self._in_service()
                was_ready = child.is_ready
                return await child.call(method, arguments, activity)
        except TimeoutError as error:
            if child is not None and was_ready and not child.is_retired:
                self._make_room()
                self._retire(child, "a call passed its deadline")
            raise RetriableRemoteStorageError(f"{self._name}: no progress in {timeout_s} s") from error

    async def _in_service(self) -> _Child:
        async with self._starting:
            if not self._is_open:
                raise RuntimeError(f"{self._name} is not open")
            if self._child is None or self._child.is_retired:
                if self._child is not None and self._child not in self._retired:  # the child ended by itself
                    self._retired.append(self._child)
                self._child = await _start(self._name, self._task)
            return self._child

    def _has_room(self) -> bool:
        return sum(one.is_alive() and one.is_busy for one in self._retired) < MAX_RETIRED

    def _make_room(self) -> None:
        self._retired = [one for one in self._retired if one.is_alive()]
        while len(self._retired) >= MAX_RETIRED:
            oldest = min(self._retired, key=lambda one: one.is_busy)  # of those without calls, if there are any
            self._retired.remove(oldest)
            oldest.kill()

    def _retire(self, child: _Child, reason: str) -> None:
        logger.warning("replacing the child process of a store", extra={"store": self._name, "reason": reason})
        self._retired = [*(one for one in self._retired if one.is_alive()), child]
        child.retire()


class _Child(asyncio.Protocol):
    """One child process and its pending calls."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], grace_s: float) -> None:
        self._name = name
        self._grace_s = grace_s
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._frames = FrameBuffer()
        self._pending: dict[int, asyncio.Future[object]] = {}
        self._activities: dict[int, Activity] = {}
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

    async def call(self, method: str, arguments: tuple[object, ...], activity: Activity) -> object:
        number, self._next = self._next, self._next + 1
        future: asyncio.Future[object] = self._loop.create_future()
        self._pending[number] = future
        self._activities[number] = activity
        try:
            self._send((number, method, arguments))
            return await future
        except asyncio.CancelledError:
            self._send((number, CANCEL, ()))
            raise
        finally:
            del self._pending[number], self._activities[number]
            if self.is_retired and not self._pending:
                self.hang_up()

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
        elif request[1] != CANCEL:
            raise RetriableRemoteStorageError(f"{self._name}: the store's child process has ended")

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's are not subclasses of asyncio's

    def data_received(self, data: bytes) -> None:
        answer: Answer | Moved
        for answer in self._frames.feed(data):
            if len(answer) == 1:
                if (activity := self._activities.get(answer[0])) is not None:
                    activity.moved()
                continue
            number, result, error = answer
            if number == READY:
                self.is_ready = True
                self._start_deadline.cancel()
                continue
            future = self._pending.get(number)
            if future is not None and not future.done():
                if error is None:
                    future.set_result(result)
                else:
                    future.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.hang_up()
        for future in self._pending.values():
            if not future.done():
                future.set_exception(RetriableRemoteStorageError(f"{self._name}: the store's child process has ended"))


async def _start(name: str, task: Task) -> _Child:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    with theirs:
        process = _spawn(theirs.fileno())
    loop = asyncio.get_running_loop()
    try:
        transport, child = await loop.create_unix_connection(lambda: _Child(name, process, task.grace_s), sock=ours)
    except BaseException:
        ours.close()
        process.kill()
        process.wait()
        raise
    transport.write(frame_of(task))
    return child


def _spawn(channel: int) -> subprocess.Popen[bytes]:
    # `-P` keeps the working directory out of the module search path, so it cannot shadow the project's modules.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    command = [sys.executable, "-P", "-m", "tiers.storage.child_main", str(channel)]
    return subprocess.Popen(command, env=environment, pass_fds=[channel], stdin=subprocess.DEVNULL)
