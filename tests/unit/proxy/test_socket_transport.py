"""`SocketTransport` behaves as a transport of the event loop does, and keeps the order of what it writes and relays."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from proxy.wire.flow_control import BufferPool, Outlet
from proxy.wire.socket_transport import LOW_WATER_BYTES, PipePool, SocketTransport

KIB = 1024
LARGE = bytes(range(256)) * (4 * 1024)


class Recorder(asyncio.BufferedProtocol):
    """Notes what it is told. It relays `opaque` bytes to `target` before it reads again."""

    def __init__(self) -> None:
        self.buffer = bytearray(64 * KIB)
        self.received = bytearray()
        self.told: list[str] = []
        self.lost = asyncio.Event()
        self.error: Exception | None = None
        self.keeps_open = False
        self.on_data: Callable[[], None] = lambda: None
        self.opaque = 0
        self.target: SocketTransport | None = None
        self.source: SocketTransport | None = None
        """The transport that must not read while this one is full."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.told.append("made")

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self.buffer[:nbytes]
        self.opaque = max(0, self.opaque - nbytes)
        self.on_data()

    def eof_received(self) -> bool:
        self.told.append("end")
        return self.keeps_open

    def pause_writing(self) -> None:
        self.told.append("pause")
        if self.source is not None:
            self.source.pause_reading()

    def resume_writing(self) -> None:
        self.told.append("resume")
        if self.source is not None:
            self.source.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self.told.append("lost")
        self.error = exc
        self.lost.set()

    @property
    def due_bytes(self) -> int:
        return self.opaque

    @property
    def opaque_bytes(self) -> int:
        return self.opaque

    def relay(self, fd: int, max_bytes: int) -> int | None:
        assert self.target is not None
        moved = self.target.splice(fd, min(self.opaque, max_bytes))
        self.opaque -= moved or 0
        return moved


class End:
    """A transport with its protocol, and the peer's socket."""

    def __init__(self, pipes: PipePool) -> None:
        ours, self.peer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        for sock in (ours, self.peer):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * KIB)
            sock.setblocking(False)
        self.protocol = Recorder()
        self.transport = SocketTransport(ours, self.protocol, pipes, relaying=self.protocol)

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.peer, data)

    async def receive(self, size: int) -> bytes:
        data = bytearray()
        async with asyncio.timeout(60):
            while len(data) < size and (more := await asyncio.get_running_loop().sock_recv(self.peer, size)):
                data += more
        return bytes(data)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - it has no event
                await asyncio.sleep(0)


@pytest.fixture
def pipes() -> PipePool:
    return PipePool(min_splice_bytes=1)


@asynccontextmanager
async def end_of(pipes: PipePool) -> AsyncIterator[End]:
    end = End(pipes)
    try:
        yield end
    finally:
        end.transport.abort()
        await end.protocol.lost.wait()
        with suppress(OSError):
            end.peer.close()


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_what_the_socket_does_not_take_leaves_later_and_in_order(pipes: PipePool) -> None:
    async with end_of(pipes) as end:
        end.transport.write(b"first")
        assert end.transport.get_write_buffer_size() == 0
        end.transport.write(LARGE)
        end.transport.writelines([b"a", b"", *([b"bc"] * 3_000)])
        assert end.transport.get_write_buffer_size() > 0
        end.transport.write(b"")
        end.transport.write(b"last")
        assert end.protocol.told == ["made", "pause"]
        assert await end.receive(10 + len(LARGE) + 6_000) == b"first" + LARGE + b"a" + b"bc" * 3_000 + b"last"
        await end.until(lambda: end.protocol.told == ["made", "pause", "resume"])
        assert end.transport.get_write_buffer_size() == 0


async def test_a_paused_transport_reads_nothing(pipes: PipePool) -> None:
    async with end_of(pipes) as end:
        end.protocol.on_data = end.transport.pause_reading
        await end.send(b"one")
        await end.until(lambda: end.protocol.received == b"one")
        await end.send(b"two")
        for _ in range(20):
            await asyncio.sleep(0)
        assert end.protocol.received == b"one"
        end.transport.resume_reading()
        await end.until(lambda: end.protocol.received == b"onetwo")


@pytest.mark.parametrize("keeps_open", [True, False])
async def test_the_end_of_the_stream_is_told_once(keeps_open: bool, pipes: PipePool) -> None:
    async with end_of(pipes) as end:
        end.protocol.keeps_open = keeps_open
        end.peer.shutdown(socket.SHUT_WR)
        await end.until(lambda: "end" in end.protocol.told)
        end.transport.resume_reading()
        if keeps_open:
            end.transport.write(b"still")
            assert await end.receive(5) == b"still"
            end.transport.close()
        await end.protocol.lost.wait()
        assert end.protocol.told == ["made", "end", "lost"]
        assert await end.receive(1) == b""


async def test_a_close_lets_the_written_bytes_leave(pipes: PipePool) -> None:
    async with end_of(pipes) as end:
        end.transport.write(LARGE)
        end.transport.close()
        end.transport.write(b"too late")
        assert end.transport.is_closing()
        assert await end.receive(len(LARGE) + 1) == LARGE
        await end.protocol.lost.wait()
        assert end.protocol.error is None


async def test_a_close_before_all_was_read_cuts_no_answer(pipes: PipePool) -> None:
    """An unread request would make the kernel reset the connection, and drop what the peer has not received."""
    protocol, written = Recorder(), 0
    with connection() as (ours, peer):
        transport = SocketTransport(ours, protocol, pipes)
        transport.pause_reading()
        with suppress(BlockingIOError):  # the kernel takes all that it can, and the peer reads none of it yet
            while True:
                written += ours.send(LARGE[:KIB])
        await asyncio.to_thread(peer.sendall, b"a request that nobody reads")
        transport.close()
        peer.settimeout(60)
        received = 0
        while more := await asyncio.to_thread(peer.recv, 64 * KIB):
            received += len(more)
        assert received == written
        await protocol.lost.wait()
        assert protocol.error is None


async def test_an_abort_drops_the_written_bytes(pipes: PipePool) -> None:
    async with end_of(pipes) as end:
        end.transport.write(LARGE)
        end.transport.abort()
        end.transport.abort()
        await end.protocol.lost.wait()
        assert len(await end.receive(len(LARGE))) < len(LARGE)
        assert end.protocol.told.count("lost") == 1


async def test_a_peer_that_is_gone_ends_the_transport_with_the_error(pipes: PipePool) -> None:
    async with end_of(pipes) as end:
        end.transport.pause_reading()
        end.peer.close()
        end.transport.write(LARGE)
        await end.protocol.lost.wait()
        assert isinstance(end.protocol.error, BrokenPipeError)


async def test_a_protocol_that_fails_ends_its_transport(pipes: PipePool) -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context["exception"]))

    def fail() -> None:
        raise ValueError("a defect")

    async with end_of(pipes) as end:
        end.protocol.on_data = fail
        await end.send(b"x")
        await end.protocol.lost.wait()
        assert isinstance(end.protocol.error, ValueError)
        assert reported == [end.protocol.error]


async def test_relayed_bytes_keep_their_place_among_the_written_ones(pipes: PipePool) -> None:
    async with end_of(pipes) as source, end_of(pipes) as target, asyncio.TaskGroup() as tasks:
        target.protocol.source = source.transport
        source.protocol.target, source.protocol.opaque = target.transport, len(LARGE)
        source.protocol.on_data = lambda: target.transport.write(bytes(source.protocol.received[-4:]))
        target.transport.write(b"head")
        tasks.create_task(source.send(LARGE + b"tail"))
        assert await target.receive(8 + len(LARGE)) == b"head" + LARGE + b"tail"
        assert source.protocol.received == b"tail"


async def test_bytes_in_a_pipe_count_and_leave_before_later_ones(pipes: PipePool) -> None:
    async with end_of(pipes) as source, end_of(pipes) as target:
        source.transport.pause_reading()
        filler = bytes(8 * KIB)
        sent = 0
        with suppress(BlockingIOError):
            while True:
                sent += target.transport._sock.send(filler)
        await source.send(b"relayed")
        assert target.transport.splice(source.transport._fd, 100) == 7
        assert target.transport.get_write_buffer_size() == 7
        assert target.protocol.told == ["made", "pause"]
        target.transport.write(b" written")
        assert (await target.receive(sent + 15))[sent:] == b"relayed written"
        await target.until(lambda: target.protocol.told == ["made", "pause", "resume"])


async def test_bytes_in_a_pipe_have_not_left_when_the_pause_is_told(pipes: PipePool) -> None:
    """The deadline of a client that stalls begins with the pause."""
    async with end_of(pipes) as source, end_of(pipes) as target:
        source.transport.pause_reading()
        outlet = Outlet(BufferPool())
        outlet.attach(target.transport)
        told: list[int] = []
        target.protocol.pause_writing = lambda: told.append(outlet.sent_bytes)  # type: ignore[method-assign]
        await source.send(LARGE[: 8 * KIB])
        with suppress(BlockingIOError):
            while True:
                target.transport._sock.send(bytes(KIB))
        assert outlet.splice(source.transport._fd, 8 * KIB) == 8 * KIB
        assert told == [outlet.sent_bytes]


async def test_bytes_in_a_pipe_end_with_their_connection_alone() -> None:
    pipes = PipePool(max_pipes=1, min_splice_bytes=1)
    async with end_of(pipes) as source, end_of(pipes) as other:
        source.transport.pause_reading()
        before = open_files()
        async with end_of(pipes) as target:
            with suppress(BlockingIOError):
                while True:
                    target.transport._sock.send(bytes(8 * KIB))
            await source.send(b"lost")
            assert target.transport.splice(source.transport._fd, 100) == 4
            assert other.transport.splice(source.transport._fd, 100) is None
        assert open_files() == before
        await source.send(b"new")
        assert other.transport.splice(source.transport._fd, 100) == 3
        assert await other.receive(3) == b"new"
    pipes.close()


async def test_a_target_that_fails_does_not_fail_the_source(pipes: PipePool) -> None:
    async with end_of(pipes) as source, end_of(pipes) as target:
        source.transport.pause_reading()
        target.transport.pause_reading()
        target.peer.close()
        await source.send(b"bytes")
        assert target.transport.splice(source.transport._fd, 100) == 5
        await target.protocol.lost.wait()
        assert isinstance(target.protocol.error, BrokenPipeError)
        assert not source.transport.is_closing()


async def test_without_a_pipe_the_bytes_are_read() -> None:
    async with end_of(PipePool(max_pipes=0, min_splice_bytes=1)) as source, end_of(PipePool()) as target:
        source.protocol.target, source.protocol.opaque = target.transport, 5
        target.transport._pipes = PipePool(max_pipes=0)
        await source.send(b"bytes")
        await source.until(lambda: source.protocol.received == b"bytes")


@contextmanager
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Yields the proxy's end and the peer's end of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    with ours, peer:
        ours.setblocking(False)
        yield ours, peer


@pytest.mark.parametrize("sent_bytes", [0, 10, 64 * KIB, 100 * KIB])
@pytest.mark.parametrize("opaque_bytes", [0, 70 * KIB, 1024 * KIB])
async def test_what_came_before_a_reset_is_not_lost(sent_bytes: int, opaque_bytes: int, pipes: PipePool) -> None:
    protocol = Recorder()
    async with end_of(pipes) as target, asyncio.TaskGroup() as tasks:
        with connection() as (ours, peer):
            transport = SocketTransport(ours, protocol, pipes, relaying=protocol)
            target.protocol.source, protocol.target, protocol.opaque = transport, target.transport, opaque_bytes
            transport.pause_reading()
            await asyncio.to_thread(peer.sendall, bytes(sent_bytes))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            peer.close()
            relayed = tasks.create_task(target.receive(min(opaque_bytes, sent_bytes)))
            transport.resume_reading()
            async with asyncio.timeout(60):
                await protocol.lost.wait()
            assert isinstance(protocol.error, ConnectionResetError)
            assert len(await relayed) + len(protocol.received) == sent_bytes


async def test_a_system_that_refuses_splices_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise PermissionError

    before = open_files()
    monkeypatch.setattr(os, "splice", refuse)
    assert PipePool().take() is None
    assert open_files() == before


async def test_the_kernel_waits_only_for_bytes_that_are_due() -> None:
    """The low-water mark must never be above the number of bytes that the peer is going to send."""
    pipes, protocol, sent = PipePool(), Recorder(), os.urandom(3 * LOW_WATER_BYTES)
    async with end_of(pipes) as target, asyncio.TaskGroup() as tasks:
        with connection() as (ours, peer):
            transport = SocketTransport(ours, protocol, pipes, relaying=protocol)
            target.protocol.source, protocol.target = transport, target.transport

            def low_water() -> int:
                return ours.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

            def begin() -> None:
                protocol.opaque = len(sent)
                protocol.on_data = lambda: None

            protocol.on_data = begin
            peer.sendall(b"head")
            await target.until(lambda: low_water() == LOW_WATER_BYTES)
            receiving = tasks.create_task(target.receive(len(sent)))
            for start in range(0, len(sent), 100_000):
                await asyncio.to_thread(peer.sendall, sent[start : start + 100_000])
            assert await receiving == sent
            await target.until(lambda: low_water() == 1)
            peer.sendall(b"tail")
            await target.until(lambda: protocol.received == b"headtail")
            transport.abort()
            await protocol.lost.wait()
