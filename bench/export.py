"""Measures how many megabytes of uncompressed batches per second one core exports into Parquet files:

    python -m bench.export [--mib 128]

As one task of `tidegate-pipeline export` does, the benchmark reads a tile from a store, checks and decodes it, writes
it as Parquet with zstd, and stages the file at its place. The store is a folder. The benchmark measures the CPU time of
the whole process, so that other load matters less. It prints the load average and shows the best of several rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from bench.decode import CODECS, SHAPES, runs_of_batches
from pipeline.config import parse_pipeline_config
from pipeline.decode.arrow_records import warm
from pipeline.export.job import ExportRequest, ExportTask, export_tile, read_options
from pipeline.export.plan import PlannedTile, Tile
from pipeline.export.target import target_settings
from pipeline.worker import worker
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.fakes.stored_segments import remote_range
from tiers.model.ids import TopicIdPartition

TOPIC = "orders-of-today"
ROUNDS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="uncompressed size, per line of the table")
    options = parser.parse_args()
    print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {'numba' if warm() else 'no numba'}")
    print(f"{'records':16} {'codec':7} {'MB/s':>7} {'M rec/s':>8} {'Parquet':>8}")
    for shape, (value_bytes, batch_bytes) in SHAPES.items():
        for name, codec in CODECS.items():
            runs, size, records = runs_of_batches(value_bytes, batch_bytes, codec, options.mib << 20, False)
            seconds, file_bytes = _measured(runs, records)
            speed = size / seconds / 1e6
            print(f"{shape:16} {name:7} {speed:7.0f} {records / seconds / 1e6:8.2f} {size / file_bytes:7.2f}x")


def _measured(runs: list[bytes], records: int) -> tuple[float, int]:
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        root = Path(folder)
        tier = RemoteTier(root, chunk_bytes=1 << 20)
        segment = asyncio.run(tier.add(TopicIdPartition(TOPIC_ID, 0, TOPIC), runs, 0))
        config = parse_pipeline_config(
            '[upstream]\nbootstrap.servers = "localhost:9092"\n'
            f'[storage]\nimplementation = "local"\npath = "{root / "store"}"\ncluster.id = "test"\n'
        )
        request = ExportRequest(TOPIC, target_settings(str(root / "lake"), config, {}))
        task = ExportTask(request, read_options(config, request), "test", TOPIC_ID)
        planned = PlannedTile(Tile(0, 0, records - 1), (remote_range(segment, 0, records - 1),))
        worker()
        best = float("inf")
        for _ in range(ROUNDS):
            began = time.process_time()
            result = export_tile(task, planned)
            best = min(best, time.process_time() - began)
            assert result.records == records
        return best, result.file_bytes


if __name__ == "__main__":
    main()
