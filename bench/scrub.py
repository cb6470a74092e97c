"""Measures how fast a scrub reads back and checks a folder's segments: `python -m bench.scrub [--mib 512] [--spark]`.

The table shows MB (10^6 bytes) per CPU second of one core, of the stored log and of its uncompressed size. It also
shows MB of the stored log per second of wall time, with one worker and with two. The lines are the levels batch and
deep, for batches of about 64 KB with 512-byte records and of about 16 KB with 100-byte records, uncompressed and with
zstd. The level deep decompresses zstd batches to several times their stored size. The tasks are those of the job.
They run in processes of this machine, or with `--spark` in Spark.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from bench.decode import SHAPES, runs_of_batches
from pipeline.config import PipelineConfig, parse_pipeline_config
from pipeline.decode.arrow_records import warm
from pipeline.maintenance.segment_scrub import ScrubbedSegment, ScrubSetup, scrub_segments
from pipeline.process_runner import ProcessRunner
from pipeline.spark.runner import SparkRunner
from pipeline.spark.session import open_session
from pipeline.worker import worker
from protocol.records.record_batch import CODEC_NONE, CODEC_ZSTD
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.segment_builder import SegmentBuilder
from tiers.storage.local import LocalRemoteStorageManager
from tiers.upkeep.runner import Runner

SEGMENTS = 8
CODECS = {"none": CODEC_NONE, "zstd": CODEC_ZSTD}
PARTITION = TopicIdPartition(uuid.UUID(int=6), 0, "orders")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=512, help="uncompressed size, per line of the table")
    parser.add_argument("--rounds", type=int, default=3, help="the table shows the best round")
    parser.add_argument("--spark", action="store_true", help="run the tasks on local[1] and local[2]")
    options = parser.parse_args()
    warm()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores")
    columns = f"{'ratio':>5} {'CPU':>6} {'uncompressed':>13} {'wall, 1':>8} {'wall, 2':>8}"
    print(f"{'records':16} {'codec':6} {'level':6} {columns}")
    for shape, (value_bytes, batch_bytes) in SHAPES.items():
        for name, codec in CODECS.items():
            with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
                config, segments, uncompressed = _store(Path(folder), value_bytes, batch_bytes, codec, options.mib)
                stored = sum(each.segment_size_bytes for each in segments)
                for level in ("batch", "deep"):
                    setup = ScrubSetup(config, "bench", level == "deep")
                    one, two, cpu = _measured(setup, segments, options.rounds, options.spark)
                    rates = f"{stored / cpu / 1e6:6.0f} {uncompressed / cpu / 1e6:13.0f}"
                    wall = f"{stored / one / 1e6:8.0f} {stored / two / 1e6:8.0f}"
                    ratio = uncompressed / stored
                    load = os.getloadavg()[0]
                    print(f"{shape:16} {name:6} {level:6} {ratio:5.2f} {rates} {wall}   load {load:.1f}")


def _store(
    folder: Path, value_bytes: int, batch_bytes: int, codec: int, mib: int
) -> tuple[PipelineConfig, list[RemoteLogSegmentMetadata], int]:
    """Fills a store with segments that have the same content and different uuids."""
    chunks, size, _ = runs_of_batches(value_bytes, batch_bytes, codec, (mib << 20) // SEGMENTS, False)
    builder = SegmentBuilder(folder / "spool", 0)
    for chunk in chunks:
        builder.append(chunk, ())
    built = builder.finish()
    (folder / "store").mkdir()
    store = LocalRemoteStorageManager({"path": str(folder / "store"), "cluster.id": "bench"})
    segments = []

    async def fill() -> None:
        await store.open()
        for _ in range(SEGMENTS):
            segment = RemoteLogSegmentMetadata(
                segment_id=RemoteLogSegmentId(PARTITION, uuid.uuid4()),
                start_offset=built.start_offset,
                end_offset=built.end_offset,
                broker_id=1,
                max_timestamp_ms=built.max_timestamp_ms,
                event_timestamp_ms=0,
                segment_leader_epochs=built.segment_leader_epochs,
                segment_size_bytes=built.size_bytes,
                state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
                txn_index_empty=built.txn_index_empty,
            )
            await store.copy_log_segment_data(segment, built.log_segment_data(segment))
            segments.append(segment)
        await store.close()

    worker().run(fill())
    builder.discard()
    config = parse_pipeline_config(
        '[upstream]\nbootstrap.servers = "localhost:1"\n'
        f'[storage]\nimplementation = "local"\npath = "{folder / "store"}"\n"cluster.id" = "bench"\n'
    )
    return config, segments, size * SEGMENTS


async def timed(setup: ScrubSetup, segments: Sequence[RemoteLogSegmentMetadata]) -> tuple[float, list[ScrubbedSegment]]:
    """Scrubs the segments. Also returns the CPU seconds of all threads of the process."""
    began = time.process_time()
    scrubbed = await scrub_segments(setup, segments)
    return time.process_time() - began, scrubbed


def _measured(
    setup: ScrubSetup, segments: Sequence[RemoteLogSegmentMetadata], rounds: int, is_spark: bool
) -> tuple[float, float, float]:
    """Returns the best wall time in seconds with one and with two workers, and the best CPU seconds with one."""
    halves = [tuple(segments[: SEGMENTS // 2]), tuple(segments[SEGMENTS // 2 :])]
    wall: dict[int, float] = {}
    cpu = float("inf")
    for workers in (1, 2):
        with _runner(workers, is_spark) as runner:

            def run(runner: Runner = runner) -> list[tuple[float, list[ScrubbedSegment]]]:
                return asyncio.run(runner.run("scrub", halves, partial(timed, setup)))

            run()  # not timed: opens files, imports modules, compiles kernels
            for _ in range(rounds):
                began = time.monotonic()
                results = run()
                wall[workers] = min(wall.get(workers, float("inf")), time.monotonic() - began)
                if workers == 1:
                    cpu = min(cpu, sum(seconds for seconds, _ in results))
                for _, scrubbed in results:
                    assert not any(each.verdict.damages or each.trouble for each in scrubbed)
    return wall[1], wall[2], cpu


@contextmanager
def _runner(workers: int, is_spark: bool) -> Iterator[Runner]:
    if is_spark:
        with open_session(f"local[{workers}]") as session:
            yield SparkRunner(session)
        return
    with ProcessRunner() as processes:
        processes.parallelism = workers
        yield processes


if __name__ == "__main__":
    main()
