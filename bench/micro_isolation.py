"""How much does a backfill hold up the process that serves the clients? `python -m bench.micro_isolation [--mib 512]`.

Four streams read segments of a real S3 server on loopback, 1 MiB at a time, and a client on a socket takes the bytes.
Either the process of the clients reads the store itself, or it asks another process, the remote reader. All times are
CPU times of the event loop of the process of the clients, so other load on the machine hardly changes them: per byte,
and per turn. A record at the tail waits for the turn that runs when it arrives. So a turn counts by its length.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.ending import run
from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.servers.versitygw import VersityGateway
from tiers.broker.client import monotonic_ms
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteRead, RemoteReadRequest
from tiers.reader.shared.channel import Address, SharedBuffers, listen
from tiers.reader.shared.lent_reads import RemoteReadClient, RemoteReadServer
from tiers.storage.s3.storage import S3RemoteStorageManager

MIB: Final = 1 << 20
BUCKET: Final = "isolation"
STREAMS: Final = 4
SEGMENT_MIB: Final = 32
RECORDS_OF_A_BATCH: Final = 16
VALUE_BYTES: Final = 16 * 1024
SHARES: Final = (0.5, 0.99, 0.999)

Read = Callable[[RemoteReadRequest], Awaitable[RemoteRead]]


IDLE_S: Final = 20e-6
"""A ticker makes the loop turn without a pause. A turn that is shorter had no other work."""


class Turns:
    """The CPU time of each turn of the running loop that had work."""

    def __init__(self) -> None:
        self.lengths_s: list[float] = []
        self._last_s = 0.0
        self._is_over = False

    def start(self) -> None:
        self._last_s = time.thread_time()
        asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> None:
        self._is_over = True

    def _tick(self) -> None:
        now_s = time.thread_time()
        if now_s - self._last_s > IDLE_S:
            self.lengths_s.append(now_s - self._last_s)
        self._last_s = now_s
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._tick)

    def met_ms(self, share: float) -> float:
        """Returns the length that is not exceeded, with that share, by the turn that runs at a random time of work."""
        left_s = share * sum(self.lengths_s)
        for length_s in sorted(self.lengths_s):
            left_s -= length_s
            if left_s <= 0:
                return length_s * 1000
        return 0.0


async def fill(settings: dict[str, str], folder: Path, segments: int) -> RemoteTier:
    tier = RemoteTier(folder, chunk_bytes=MIB)
    tier.storage = FaultyStorage(S3RemoteStorageManager({**settings, "cluster.id": "bench"}))
    batches = SEGMENT_MIB * MIB // (RECORDS_OF_A_BATCH * VALUE_BYTES)
    for number in range(STREAMS):
        await tier.fill(
            TopicIdPartition(TOPIC_ID, number, "orders"),
            segments=segments,
            batches=batches,
            records=RECORDS_OF_A_BATCH,
            value_bytes=VALUE_BYTES,
        )
    return tier


async def stream(read: Read, number: int, records: int, sink: socket.socket) -> int:
    """Reads a partition to its end and writes it to a socket. Returns the number of bytes."""
    loop, offset, read_bytes = asyncio.get_running_loop(), 0, 0
    partition = TopicIdPartition(TOPIC_ID, number, "orders")
    while offset < records:
        request = RemoteReadRequest(partition, offset, MIB, True, 0, monotonic_ms() + 60_000, number)
        found = await read(request)
        for view in found.records:
            await loop.sock_sendall(sink, view)
        read_bytes += found.size_bytes
        offset = found.next_offset
    return read_bytes


async def measure(read: Read, records: int) -> tuple[float, float, Turns]:
    """Returns MB/s, CPU seconds of this loop per GB, and its turns."""
    context = multiprocessing.get_context("spawn")
    ours = []
    for _ in range(STREAMS):
        end, theirs = socket.socketpair()
        end.setblocking(False)
        context.Process(target=drain, args=(theirs,), daemon=True).start()
        theirs.close()
        ours.append(end)
    turns = Turns()
    began_s = time.monotonic()
    turns.start()
    found = await asyncio.gather(*(stream(read, number, records, end) for number, end in enumerate(ours)))
    turns.stop()
    took_s, gb = time.monotonic() - began_s, sum(found) / 1e9
    for end in ours:
        end.close()
    return gb * 1000 / took_s, sum(turns.lengths_s) / gb, turns


def drain(peer: socket.socket) -> None:
    buffer = bytearray(MIB)
    while peer.recv_into(buffer):
        pass


async def alone(settings: dict[str, str], segments: int, records: int) -> tuple[float, float, Turns]:
    with tempfile.TemporaryDirectory() as folder:
        tier = await fill(settings, Path(folder), segments)
        async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader:
            found = await measure(reader.read, records)
        await tier.storage.close()
        return found


async def beside(address: Address, records: int) -> tuple[float, float, Turns]:
    async with RemoteReadClient(address, monotonic_ms) as client:
        return await measure(client.read, records)


def serve(settings: dict[str, str], segments: int, pipe: Connection) -> None:
    async def main() -> None:
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            tier = await fill(settings, Path(folder), segments)
            listener, buffers = stack.enter_context(listen()), SharedBuffers()
            tier.storage.use_memory(buffers.memory_for)
            reader = await stack.enter_async_context(RemoteLogReader(tier.rlmm.log, tier.storage, share=buffers.share))
            await stack.enter_async_context(RemoteReadServer(listener, reader, buffers))
            pipe.send(listener.getsockname())
            await asyncio.get_running_loop().run_in_executor(None, pipe.recv)
            stack.push_async_callback(tier.storage.close)

    uvloop.run(main())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mib", type=int, default=512)
    segments = max(1, parser.parse_args().mib // SEGMENT_MIB // STREAMS)
    records = segments * SEGMENT_MIB * MIB // VALUE_BYTES
    table = Table()
    for title in ("who reads the store", "MB/s", "CPU s/GB", *(f"turn met, p{100 * share:g} ms" for share in SHARES)):
        table.add_column(title)
    with VersityGateway() as store:
        asyncio.run(store.create_bucket(BUCKET))
        settings = store.settings(BUCKET)
        found = {"the process of the clients": uvloop.run(alone(settings, segments, records))}
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(settings, segments, theirs))
        process.start()
        found["a process of its own"] = uvloop.run(beside(ours.recv(), records))
        ours.send(None)
        process.join()
    for name, (mb_per_s, cpu_s, turns) in found.items():
        met = [f"{turns.met_ms(share):.2f}" for share in SHARES]
        table.add_row(name, f"{mb_per_s:.0f}", f"{cpu_s:.2f}", *met)
    Console().print(table)
    return 0


if __name__ == "__main__":
    run(main)
