"""What does a ranged GET cost? `python -m bench.micro_reads [--mib 1024] [--rounds 3]`.

It reads ranges of one object from a real S3 server on loopback, with aiobotocore, with aiohttp and a presigned URL, and
as Tidegate does. Then the reader of the remote tier reads a partition of 244 MiB three times from a store far away, by
1 MiB at a time. It has a cache of 128 MiB, so its memory is new in the first pass, and used again in the others.

Each client runs in a process of its own, on uvloop, and keeps the last 256 MiB that it read, as the chunk cache does.
CPU seconds are those of that process alone. The clients take turns, and the figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import IO, Any, Final

import aiohttp
import uvloop
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from rich.console import Console
from rich.table import Table
from yarl import URL

from bench.ending import run
from bench.rig.modelled_store import ModelledStore
from bench.rig.store_model import FAR
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.servers.versitygw import VersityGateway
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.reader.chunk_fetcher import RemoteLogReaderSettings
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteReadRequest
from tiers.storage.s3.buffers import ReusedBuffers
from tiers.storage.s3.download import S3Downloader
from tiers.storage.s3.storage import S3RemoteStorageManager

MIB: Final = 1 << 20
GIB_IN_MIB: Final = 1024
BUCKET, KEY = "micro-reads", "object"
OBJECT_BYTES: Final = 256 * MIB
KEPT_BYTES: Final = 256 * MIB
SEGMENTS: Final = 4
BATCHES: Final = 1000
CLIENT_S: Final = 0.002
"""The time in which the client takes 1 MiB."""
SHAPES: Final = ((1 * MIB, 8), (8 * MIB, 1), (8 * MIB, 4))

Get = Callable[[int, int], Awaitable[object]]
"""Reads the bytes from a position to another one, both inclusive."""


@asynccontextmanager
async def client_of(settings: Mapping[str, str]) -> AsyncIterator[Any]:
    async with get_session().create_client(
        "s3",
        endpoint_url=settings["endpoint.url"],
        region_name=settings["region"],
        aws_access_key_id=settings["access.key.id"],
        aws_secret_access_key=settings["secret.access.key"],
        config=AioConfig(signature_version="s3v4", s3={"addressing_style": "path"}),
    ) as client:
        yield client


@asynccontextmanager
async def aiobotocore(settings: Mapping[str, str]) -> AsyncIterator[Get]:
    async with client_of(settings) as client:

        async def get(start: int, end: int) -> bytes:
            answer = await client.get_object(Bucket=BUCKET, Key=KEY, Range=f"bytes={start}-{end}")
            async with answer["Body"] as body:
                return bytes(await body.read())

        yield get


@asynccontextmanager
async def aiohttp_presigned(settings: Mapping[str, str]) -> AsyncIterator[Get]:
    async with client_of(settings) as client, aiohttp.ClientSession(auto_decompress=False) as session:
        url = URL(await client.generate_presigned_url("get_object", {"Bucket": BUCKET, "Key": KEY}), encoded=True)

        async def get(start: int, end: int) -> bytearray:
            async with session.get(url, headers={"Range": f"bytes={start}-{end}"}) as response:
                buffer = bytearray(response.content_length or 0)
                position = 0
                async for piece in response.content.iter_any():
                    buffer[position : position + len(piece)] = piece
                    position += len(piece)
                return buffer

        yield get


@asynccontextmanager
async def tidegate(settings: Mapping[str, str]) -> AsyncIterator[Get]:
    async with client_of(settings) as client:
        downloader = S3Downloader(client, BUCKET, timeout_s=30, max_connections=64)
        allocate = ReusedBuffers().allocate
        yield lambda start, end: downloader.get(KEY, start, end, allocate)
        await downloader.close()


CLIENTS: Final = {"aiobotocore": aiobotocore, "aiohttp, presigned": aiohttp_presigned, "Tidegate": tidegate}


async def read(client: str, settings: Mapping[str, str], size: int, at_once: int, total: int) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds in which `total` bytes were read."""
    kept: deque[object] = deque(maxlen=KEPT_BYTES // size)
    positions = iter(range(0, total, size))

    async def work(get: Get) -> None:
        for position in positions:
            start = position % OBJECT_BYTES
            kept.append(await get(start, start + size - 1))

    async with CLIENTS[client](settings) as get:
        await asyncio.gather(*(get(0, MIB - 1) for _ in range(at_once)))
        began, cpu = time.perf_counter(), cpu_seconds()
        await asyncio.gather(*(work(get) for _ in range(at_once)))
        return time.perf_counter() - began, cpu_seconds() - cpu


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def read_in_process(*given: Any) -> tuple[float, float]:
    return uvloop.run(read(*given))


async def read_back(store: VersityGateway, endpoint_url: str, folder: Path) -> list[tuple[float, float, float]]:
    """Returns MB/s, CPU s/GiB and the time to the first records in ms, for each pass."""
    partition = TopicIdPartition(TOPIC_ID, 0, "history")
    tier = RemoteTier(folder, chunk_bytes=MIB)
    settings = store.settings(BUCKET) | {"cluster.id": "micro-reads"}
    near = S3RemoteStorageManager(settings)
    tier.storage = FaultyStorage(near)
    batches = await tier.fill(partition, segments=SEGMENTS, batches=BATCHES, records=1, value_bytes=64_000)
    await near.close()
    far = S3RemoteStorageManager(settings | {"endpoint.url": endpoint_url})
    await far.open()
    cache = RemoteLogReaderSettings(remote_log=RemoteLogConfig(chunk_cache_bytes=128 * MIB))
    passes = []
    async with RemoteLogReader(tier.rlmm.log, far, cache) as reader:
        for _ in range(3):
            offset = total = 0
            first_s = 0.0
            began, cpu = time.perf_counter(), cpu_seconds()
            while offset < len(batches):
                deadline_ms = monotonic_ms() + 60_000
                read = await reader.read(RemoteReadRequest(partition, offset, MIB, True, 0, deadline_ms, 1))
                first_s = first_s or time.perf_counter() - began
                offset = [batch for view in read.records for batch in iterate_batches(view)][-1].next_offset
                total += read.size_bytes
                await asyncio.sleep(CLIENT_S)
            seconds = time.perf_counter() - began
            passes.append((total / seconds / 1e6, (cpu_seconds() - cpu) * (1 << 30) / total, first_s * 1000))
    await far.close()
    return passes


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=1024, help="what each client reads in a round")
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    console = Console()
    measured: dict[tuple[str, tuple[int, int]], list[tuple[float, float]]] = {}
    with VersityGateway() as server, tempfile.TemporaryFile() as body:
        body.write(bytes(range(256)) * (OBJECT_BYTES // 256))
        body.seek(0)
        asyncio.run(put(server, body))
        processes = multiprocessing.get_context("spawn")
        for _ in range(given.rounds):
            for shape in SHAPES:
                for client in CLIENTS:
                    with processes.Pool(1) as pool:
                        figures = pool.apply(
                            read_in_process, (client, server.settings(BUCKET), *shape, given.mib * MIB)
                        )
                    measured.setdefault((client, shape), []).append(figures)
        with ModelledStore(server.port, FAR) as far, tempfile.TemporaryDirectory() as folder:
            passes = uvloop.run(read_back(server, far.endpoint_url, Path(folder)))
    table = Table(title=f"{given.mib} MiB in ranges, medians of {given.rounds}: MB/s, client CPU s/GiB")
    table.add_column("client")
    for size, at_once in SHAPES:
        table.add_column(f"{size // MIB} MiB x{at_once}", justify="right")
    for client in CLIENTS:
        cells = []
        for shape in SHAPES:
            seconds = statistics.median(each[0] for each in measured[client, shape])
            cpu = statistics.median(each[1] for each in measured[client, shape])
            cells.append(f"{given.mib * MIB / seconds / 1e6:.0f}, {cpu / given.mib * GIB_IN_MIB:.2f}")
        table.add_row(client, *cells)
    console.print(table)
    for number, (rate, cpu, first_ms) in enumerate(passes, start=1):
        console.print(
            f"{FAR}, pass {number}: {rate:.0f} MB/s, {cpu:.2f} CPU s/GiB, first records after {first_ms:.0f} ms"
        )


async def put(server: VersityGateway, body: IO[bytes]) -> None:
    await server.create_bucket(BUCKET)
    async with server.client() as client:
        await client.put_object(Bucket=BUCKET, Key=KEY, Body=body)


if __name__ == "__main__":
    run(main)
