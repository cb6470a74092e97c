"""`ForkServer`: forks the processes of a proxy from one that has imported all modules, so that they share this memory.

The server is a process of its own: it has one thread, and no event loop, so a fork copies no state of the supervisor.
It forks a child for each request, and reports the child's exit code. Both ends talk over a socket pair in messages:

    supervisor -> server   b"f" and file descriptors: fork; b"k", pid, signal: send the signal
    server -> supervisor   b"p", pid, 0: the child of the oldest request; b"e", errno, 0: no child; b"x", pid, exit code

The server ends when the supervisor closes its end, or dies. Children outlive the server.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import select
import signal
import socket
import struct
import sys
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

MAX_FDS = 8
_MESSAGE = struct.Struct("=cii")
_FORK, _KILL, _PID, _ERROR, _EXIT = b"f", b"k", b"p", b"e", b"x"

Work = Callable[[Sequence[int]], int]
"""What a child does: it gets the file descriptors of the request, and returns the exit code."""


class ForkServerLostError(OSError):
    """The fork server died. No process can be started any more."""

    def __init__(self, pid: int) -> None:
        super().__init__(
            errno.ESRCH,
            f"process {pid}, which starts the others, died: start Tidegate again, and look at the memory limit",
        )


class ForkedProcess:
    """A running child. `returncode` is None until it has ended; a negative one is the number of a signal."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Sends the signal, unless the child has ended."""
        self._server.send_signal(self, number)

    def ended(self, code: int) -> None:
        self.returncode = code
        self._ended.set()


class ForkServer:
    """The supervisor's end. Use it as a context in the event loop that `fork` is called in."""

    def __init__(self, work: Work) -> None:
        """Starts the server. Call it before this process has threads or an event loop."""
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # The modules stay for good, so a full collection need not look at their objects, nor write to their pages.
        gc.collect()
        gc.freeze()
        self.pid = os.fork()
        if self.pid == 0:
            self._socket.close()
            _run_and_end(theirs, work)
        theirs.close()
        self._socket.setblocking(False)
        self._requests: deque[asyncio.Future[ForkedProcess]] = deque()
        self._running: dict[int, ForkedProcess] = {}
        self.loss: ForkServerLostError | None = None
        """The death of the server; None: it runs, or was closed."""

    def __enter__(self) -> ForkServer:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._socket.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self.close()

    def close(self) -> None:
        """Ends the server, if it runs."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.waitpid(self.pid, 0)

    async def fork(self, fds: Sequence[int]) -> ForkedProcess:
        """Forks a child, which inherits `fds`. Raises `OSError`, and `ForkServerLostError` if the server died."""
        request: asyncio.Future[ForkedProcess] = asyncio.get_running_loop().create_future()
        self._requests.append(request)
        try:
            socket.send_fds(self._socket, [_MESSAGE.pack(_FORK, 0, 0)], fds)
        except OSError as error:
            raise ForkServerLostError(self.pid) from error
        return await request

    def send_signal(self, process: ForkedProcess, number: signal.Signals) -> None:
        if process.returncode is None:
            with suppress(OSError):  # the loss of the server reaches `wait`
                self._socket.send(_MESSAGE.pack(_KILL, process.pid, number))

    def _read(self) -> None:
        try:
            data = self._socket.recv(_MESSAGE.size)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        kind, number, code = _MESSAGE.unpack(data)
        if kind == _EXIT:
            self._running.pop(number).ended(code)
            return
        request = self._requests.popleft()
        if kind == _ERROR:
            if not request.done():
                request.set_exception(OSError(number, os.strerror(number)))
            return
        process = self._running[number] = ForkedProcess(self, number)
        if request.done():  # the caller was cancelled
            process.send_signal(signal.SIGKILL)
        else:
            request.set_result(process)

    def _lose(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket.fileno())
        self.close()
        self.loss = ForkServerLostError(self.pid)
        for request in self._requests:
            if not request.done():
                request.set_exception(self.loss)
        self._requests.clear()
        for process in self._running.values():
            process.ended(os.EX_OSERR)
        self._running.clear()


def _serve(control: socket.socket, work: Work) -> int:
    """Serves the requests until the supervisor closes its end. A child returns from here with its exit code."""
    children: set[int] = set()
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(writes)
    poll = select.poll()
    for each in (control.fileno(), reads):
        poll.register(each, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if reads in ready:
            os.read(reads, 512)
            _report_ended(control, children)
        if control.fileno() not in ready:
            continue
        try:
            data, fds, _, _ = socket.recv_fds(control, _MESSAGE.size, MAX_FDS)
        except ConnectionResetError:  # the supervisor died before it had read a report
            return 0
        if not data:
            return 0
        kind, pid, number = _MESSAGE.unpack(data)
        if kind == _KILL:
            if pid in children:
                os.kill(pid, number)
            continue
        try:
            pid = os.fork()
        except OSError as error:
            _send(control, _ERROR, error.errno or errno.EAGAIN)
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                os.close(reads)
                os.close(writes)
                return work(fds)
            children.add(pid)
            _send(control, _PID, pid)
        for each in fds:
            os.close(each)


def _report_ended(control: socket.socket, children: set[int]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            children.discard(pid)
            _send(control, _EXIT, pid, os.waitstatus_to_exitcode(status))


def _send(control: socket.socket, kind: bytes, number: int, code: int = 0) -> None:
    with suppress(OSError):  # the supervisor is gone, and the next read ends the server
        control.send(_MESSAGE.pack(kind, number, code))


def _run_and_end(control: socket.socket, work: Work) -> None:
    """Ends this process afterwards. The frames below are those of the supervisor, so nothing unwinds them."""
    code = 1
    try:
        code = _serve(control, work)
    except BaseException:
        traceback.print_exc()
    finally:
        for each in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):  # None: it was closed when the program began
                each.flush()
        os._exit(code)
