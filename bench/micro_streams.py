"""How fast do many streams read the remote tier at once? `python -m bench.micro_streams [--streams 8,16,32,64]`.

Each stream reads partitions of its own through one reader, one read of 1 MiB after the other. The store is a real S3
server that is far away. A row with other settings than the defaults shows what the number of downloads is worth.

The columns are MB/s of all streams, GETs per GiB with those of indexes, CPU s/GiB of the reader's process, and the
share of the best row with as many streams. The rows take turns, and the figures are medians of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.ending import run
from bench.micro_reads import cpu_seconds
from bench.rig.modelled_store import ModelledStore
from bench.rig.store_model import FAR
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.servers.versitygw import VersityGateway
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.reader.chunk_fetcher import RemoteLogReaderSettings
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteReadRequest
from tiers.storage.s3.storage import S3RemoteStorageManager

MIB: Final = 1 << 20
GIB: Final = 1 << 30
BUCKET: Final = "micro-streams"
BATCH_BYTES: Final = 64_000
DEADLINE_MS: Final = 60_000
PARTITION_BYTES: Final = 96 * MIB
MIN_PARTITIONS: Final = 16
DEFAULT_THREADS: Final = RemoteLogConfig().reader_threads
THREADS: Final = (DEFAULT_THREADS // 2, DEFAULT_THREADS, 2 * DEFAULT_THREADS)


Figures = tuple[float, float, float]


async def filled(tier: RemoteTier, settings: Mapping[str, str], partitions: Sequence[TopicIdPartition]) -> None:
    near = S3RemoteStorageManager(settings)
    tier.storage = FaultyStorage(near)
    for each in partitions:
        await tier.fill(each, segments=1, batches=PARTITION_BYTES // BATCH_BYTES, records=1, value_bytes=BATCH_BYTES)
    await near.close()


async def measured(
    rlmm: InMemoryRemoteLogMetadataManager,
    settings: Mapping[str, str],
    partitions: Sequence[TopicIdPartition],
    streams: int,
    threads: int,
) -> Figures:
    """Returns MB/s, GETs per GiB and CPU s/GiB of `streams` streams that read all partitions."""
    store = S3RemoteStorageManager(settings)
    await store.open()
    counted = FaultyStorage(store)
    reader_settings = RemoteLogReaderSettings(RemoteLogConfig(reader_threads=threads))
    waiting = iter(partitions)
    async with RemoteLogReader(rlmm.log, counted, reader_settings) as reader:

        async def stream(connection_id: int) -> int:
            return sum([await read_all(reader, each, connection_id) for each in waiting])

        began, cpu = time.perf_counter(), cpu_seconds()
        total = sum(await asyncio.gather(*map(stream, range(streams))))
        seconds, cpu = time.perf_counter() - began, cpu_seconds() - cpu
    await store.close()
    return total / seconds / 1e6, (len(counted.gets) + counted.index_gets) * GIB / total, cpu * GIB / total


async def read_all(reader: RemoteLogReader, partition: TopicIdPartition, connection_id: int) -> int:
    """Returns the number of bytes."""
    offset = total = 0
    while offset < PARTITION_BYTES // BATCH_BYTES:
        deadline_ms = monotonic_ms() + DEADLINE_MS
        read = await reader.read(RemoteReadRequest(partition, offset, MIB, True, 0, deadline_ms, connection_id))
        offset = [batch for view in read.records for batch in iterate_batches(view)][-1].next_offset
        total += read.size_bytes
    return total


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--streams", default="8,16,32,64")
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    counts = [int(each) for each in given.streams.split(",")]
    partitions = [TopicIdPartition(TOPIC_ID, number, "history") for number in range(max(*counts, MIN_PARTITIONS))]
    results: dict[tuple[int, int], list[Figures]] = {}
    with VersityGateway() as server, tempfile.TemporaryDirectory() as folder:
        asyncio.run(server.create_bucket(BUCKET))
        settings = server.settings(BUCKET) | {"cluster.id": "micro-streams"}
        tier = RemoteTier(Path(folder), chunk_bytes=MIB)
        asyncio.run(filled(tier, settings, partitions))
        with ModelledStore(server.port, FAR) as far:
            settings["endpoint.url"] = far.endpoint_url
            forks = multiprocessing.get_context("fork")  # the tier's metadata is in memory
            for _ in range(given.rounds):
                for streams in counts:
                    for threads in THREADS:
                        receiver, sender = forks.Pipe(duplex=False)
                        given_to_it = sender, tier.rlmm, settings, partitions, streams, threads
                        process = forks.Process(target=send_figures, args=given_to_it)
                        process.start()
                        figures = receiver.recv()
                        process.join()
                        results.setdefault((streams, threads), []).append(figures)
    table = Table(title=f"{FAR}, medians of {given.rounds}")
    for column in ("streams", "downloads", "MB/s", "GETs/GiB", "CPU s/GiB", "of the best"):
        table.add_column(column, justify="right")
    medians = {row: [statistics.median(each) for each in zip(*found, strict=True)] for row, found in results.items()}
    for (streams, threads), (rate, gets, cpu) in medians.items():
        best = max(medians[streams, each][0] for each in THREADS)
        cells = f"{rate:.0f}", f"{gets:.0f}", f"{cpu:.2f}", f"{rate / best:.2f}"
        table.add_row(str(streams), str(threads) + " (default)" * (threads == DEFAULT_THREADS), *cells)
    Console().print(table)


def send_figures(sender: Connection, *given: Any) -> None:
    sender.send(uvloop.run(measured(*given)))


if __name__ == "__main__":
    run(main)
