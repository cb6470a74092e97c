"""What does a ranged GET cost? `python -m bench.micro_reads [--mib 1024] [--rounds 3]`.

It reads ranges of one object from a real S3 server on loopback, with aiobotocore, with aiohttp and a presigned URL, and
as Tidegate does.

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
from typing import IO, Any, Final

import aiohttp
import uvloop
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from rich.console import Console
from rich.table import Table
from yarl import URL

from bench.ending import run
from tests.support.servers.versitygw import VersityGateway
from tiers.storage.s3.buffers import ReusedBuffers
from tiers.storage.s3.download import S3Downloader

MIB: Final = 1 << 20
GIB_IN_MIB: Final = 1024
BUCKET, KEY = "micro-reads", "object"
OBJECT_BYTES: Final = 256 * MIB
KEPT_BYTES: Final = 256 * MIB
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


async def put(server: VersityGateway, body: IO[bytes]) -> None:
    await server.create_bucket(BUCKET)
    async with server.client() as client:
        await client.put_object(Bucket=BUCKET, Key=KEY, Body=body)


if __name__ == "__main__":
    run(main)
