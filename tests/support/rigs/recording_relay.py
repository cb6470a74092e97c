"""A relay between clients and the proxy that records every byte that a client gets.

The proxy binds one loopback address and advertises another one, on which the relay listens with the same ports.
Therefore every client connection goes through the relay, also those to advertised brokers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from functools import partial

from tests.support.servers.stream_server import StreamServer


class RecordingRelay:
    def __init__(self, host: str, upstream_host: str, ports: Sequence[int]) -> None:
        self._host = host
        self._upstream_host = upstream_host
        self._ports = ports
        self._streams: list[bytearray] = []

    def streams(self) -> list[bytes]:
        """Returns the bytes that each client connection got, in the order of the connections."""
        return [bytes(stream) for stream in self._streams]

    async def run(self, ready: threading.Event, stop: asyncio.Event) -> None:
        async with contextlib.AsyncExitStack() as stack:
            for port in self._ports:
                await stack.enter_async_context(StreamServer(partial(self._relay, port), host=self._host, port=port))
            ready.set()
            await stop.wait()

    async def _relay(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        stream = bytearray()
        self._streams.append(stream)
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(self._upstream_host, port)
        except OSError:
            writer.close()
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_copy(reader, upstream_writer, None))
            tasks.create_task(_copy(upstream_reader, writer, stream))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, record: bytearray | None) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(256 * 1024):
            if record is not None:
                record += data
            writer.write(data)
            await writer.drain()
    writer.close()


@contextlib.contextmanager
def recording_relay(host: str, upstream_host: str, ports: Sequence[int]) -> Iterator[RecordingRelay]:
    """Runs a relay on an event loop in its own thread, because the clients under test block theirs."""
    relay = RecordingRelay(host, upstream_host, ports)
    ready = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=_run, args=(loop, relay, ready, stop))
    thread.start()
    try:
        if not ready.wait(60):
            raise TimeoutError("the relay did not start")
        yield relay
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60)


def _run(loop: asyncio.AbstractEventLoop, relay: RecordingRelay, ready: threading.Event, stop: asyncio.Event) -> None:
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(relay.run(ready, stop))
