"""Where do the CPU seconds of a copy go? `python -m bench.micro_copying [--mib 512] [--segment-mib 16] [--rounds 3]`.

One process takes batches of 16 KiB with records of 1 KiB through each step of a copy to a real S3 server on loopback:
check the batches, build the segment with its indexes, make its file durable, upload both objects, read them back and
compare. It has no broker, so it neither receives the batches nor writes metadata. The figures are CPU s/GiB of this
process alone, system calls included, and medians of the rounds. With longer segments, the requests of each segment
count less.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import tempfile
import uuid
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import uvloop
from rich.console import Console
from rich.table import Table

from bench.ending import run
from protocol.records.record_batch import verify_batches
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import metadata_of
from tests.support.servers.versitygw import VersityGateway
from tiers.segment.segment_builder import SegmentBuilder
from tiers.storage.s3.storage import S3RemoteStorageManager
from tiers.verify.read_back import read_back

MIB: Final = 1 << 20
BUCKET: Final = "micro-copying"
RECORDS_OF_A_BATCH: Final = 15
VALUE_BYTES: Final = 1024
BATCH_BYTES: Final = 16 << 10
"""More than a batch has."""
READ_BYTES: Final = MIB
"""The batches of one answer of the broker have at most this size."""
VERIFY_BYTES: Final = 8 * MIB
STEPS: Final = ("check the batches", "build", "make durable", "upload", "read back and compare")


class Spent:
    """The CPU seconds of this process, by step."""

    def __init__(self) -> None:
        self.cpu_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def on(self, step: str) -> Iterator[None]:
        began = _cpu_s()
        yield
        self.cpu_s[step] += _cpu_s() - began


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def answers_of(size_bytes: int) -> list[bytes]:
    """Returns the batches of a segment of at most `size_bytes`, by answer of the broker."""
    answers: list[bytes] = []
    offset = 0
    while sum(map(len, answers)) + READ_BYTES <= size_bytes:
        batches: list[bytes] = []
        while sum(map(len, batches)) < READ_BYTES - BATCH_BYTES:
            batches.append(batch_of(offset, RECORDS_OF_A_BATCH, value_bytes=VALUE_BYTES))
            offset += RECORDS_OF_A_BATCH
        answers.append(b"".join(batches))
    return answers


async def copy(storage: S3RemoteStorageManager, answers: list[bytes], folder: Path, spent: Spent) -> None:
    """Copies one segment."""
    with spent.on("check the batches"):
        for answer in answers:
            verify_batches(answer)
    with spent.on("build"):
        builder = SegmentBuilder(folder / str(uuid.uuid4()), 0)
        for answer in answers:
            builder.append(answer, ())
    with spent.on("make durable"):
        built = builder.finish()
    segment = metadata_of(built)
    with spent.on("upload"):
        await storage.copy_log_segment_data(segment, built.log_segment_data(segment))
    with spent.on("read back and compare"):
        await read_back(storage, segment, VERIFY_BYTES)
    builder.discard()


async def measured(server: VersityGateway, folder: Path, given: argparse.Namespace) -> list[Spent]:
    await server.create_bucket(BUCKET)
    storage = S3RemoteStorageManager(server.settings(BUCKET) | {"cluster.id": BUCKET})
    await storage.open()
    answers = answers_of(given.segment_mib * MIB)
    await copy(storage, answers, folder, Spent())  # not counted: it opens connections
    rounds = []
    for _ in range(given.rounds):
        spent = Spent()
        for _ in range(max(1, given.mib // given.segment_mib)):
            await copy(storage, answers, folder, spent)
        rounds.append(spent)
    await storage.close()
    return rounds


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mib", type=int, default=512, help="what is copied in a round")
    arguments.add_argument("--segment-mib", type=int, default=16, help="the size of a segment")
    arguments.add_argument("--rounds", type=int, default=3)
    given = arguments.parse_args()
    with VersityGateway() as server, tempfile.TemporaryDirectory() as folder:
        rounds = uvloop.run(measured(server, Path(folder), given))
    gib = max(1, given.mib // given.segment_mib) * given.segment_mib / 1024
    table = Table(title=f"Segments of {given.segment_mib} MiB, medians of {given.rounds}: CPU s/GiB")
    table.add_column("step")
    table.add_column("median", justify="right")
    for step in STEPS:
        table.add_row(step, f"{statistics.median(each.cpu_s[step] for each in rounds) / gib:.2f}")
    table.add_row("all", f"{statistics.median(sum(each.cpu_s.values()) for each in rounds) / gib:.2f}")
    Console().print(table)


if __name__ == "__main__":
    run(main)
