"""The child process of a `ChildStorageManager`. It runs one storage manager for its parent, which has the deadlines.

It ends when the parent closes the connection or dies. Before it ends, it cancels the running calls and gives them time
to undo what they have begun. It ignores signals, because the parent handles them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys

from tiers.errors import RemoteStorageError
from tiers.storage.activity import while_active
from tiers.storage.child_storage import CANCEL, LENGTH, READY, Answer, Moved, Request, Task, frame_of
from tiers.storage.file_system import FileSystemRemoteStorageManager


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    asyncio.run(_serve(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # threads that hang in the library must not delay the end


async def _serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    whole: Task = pickle.loads(await _read(reader))
    served = _Served(whole.make(whole.settings).without_deadlines(), writer)
    writer.write(frame_of((READY, None, None)))
    async with asyncio.TaskGroup() as group:
        running: dict[int, asyncio.Task[None]] = {}
        try:
            while True:
                request: Request = pickle.loads(await _read(reader))
                number, method, arguments = request
                if method == CANCEL:
                    if number in running:
                        running[number].cancel()
                    continue
                task = running[number] = group.create_task(served.answer(number, method, arguments))
                task.add_done_callback(lambda _, number=number: running.pop(number))  # type: ignore[misc]
        except (asyncio.IncompleteReadError, OSError):
            for task in running.values():
                task.cancel()
    await served.wait_for_abandoned_calls(whole.grace_s * 0.8)


async def _read(reader: asyncio.StreamReader) -> bytes:
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return await reader.readexactly(length)


class _Served:
    def __init__(self, manager: FileSystemRemoteStorageManager, writer: asyncio.StreamWriter) -> None:
        self._manager = manager
        self._writer = writer
        self._opening = asyncio.Lock()
        self._is_open = False

    async def answer(self, number: int, method: str, arguments: tuple[object, ...]) -> None:
        result: object = None
        error: Exception | None = None
        try:
            await self._open()
            async with while_active(None, lambda: self._tell_progress(number)):
                result = await self._result_of(method, arguments)
        except Exception as raised:
            error = raised if isinstance(raised, RemoteStorageError | ValueError) else RemoteStorageError(repr(raised))
        answer: Answer = (number, result, error)
        self._writer.write(frame_of(answer))

    def _tell_progress(self, number: int) -> None:
        moved: Moved = (number,)
        self._writer.write(frame_of(moved))

    async def wait_for_abandoned_calls(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._manager.abandoned_calls:  # noqa: ASYNC110  # threads end without an event
                    await asyncio.sleep(0.01)

    async def _result_of(self, method: str, arguments: tuple[object, ...]) -> object:
        match method:
            case "open":
                return None
            case "list_objects":
                return [stored async for stored in self._manager.list_objects(*arguments)]  # type: ignore[arg-type]
        result = await getattr(self._manager, method)(*arguments)
        return pickle.PickleBuffer(result) if isinstance(result, memoryview) else result

    async def _open(self) -> None:
        """Opens the manager at the first call: the parent sends `open` only once, but may start several children."""
        async with self._opening:
            if not self._is_open:
                await self._manager.open()
                self._is_open = True


if __name__ == "__main__":
    main()
