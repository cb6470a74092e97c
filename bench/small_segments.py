"""How fast does one task of Spark read small segments from a far store, one after the other and ahead?

A task reads 64 segments of 1 MiB from the S3 server behind the modelled store. It decodes no records. The same reader
reads them one after the other, and asks for the next ones ahead, as it does by default. Both take turns in each round.
`times as fast` compares the two of one round.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from unittest import mock

from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Watch
from bench.measure.results import ScenarioResult, reading
from bench.rig.stage import BUCKET, Stage
from bench.rig.store_model import FAR
from pipeline.config import parse_pipeline_config
from pipeline.export.job import ExportRequest, read_options
from pipeline.export.target import TargetSettings
from pipeline.source import range_read
from pipeline.source.range_read import AHEAD_BYTES, RangeReader
from pipeline.source.read_plan import ReadRange
from pipeline.worker import worker
from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.fakes.stored_segments import remote_range
from tiers.model.ids import TopicIdPartition
from tiers.storage.s3.storage import S3RemoteStorageManager

SEGMENTS = 64
BATCHES, VALUE_BYTES = 16, 65_000
CLUSTER_ID = "small-segments"
CASE = f"{SEGMENTS} segments of 1 MiB, {FAR}"
WAYS = {"one after the other": 1, "ahead": AHEAD_BYTES}


async def filled(settings: dict[str, str], folder: Path) -> list[ReadRange]:
    tier = RemoteTier(folder, chunk_bytes=1 << 20)
    store = S3RemoteStorageManager(settings | {"cluster.id": CLUSTER_ID})
    tier.storage = FaultyStorage(store)
    ranges: list[ReadRange] = []
    for first in range(0, SEGMENTS * BATCHES, BATCHES):
        batches = [batch_of(offset, 1, value_bytes=VALUE_BYTES) for offset in range(first, first + BATCHES)]
        segment = await tier.add(TopicIdPartition(TOPIC_ID, 0, "small"), batches, first)
        ranges.append(remote_range(segment, first, first + BATCHES - 1))
    await store.close()
    return ranges


async def read(reader: RangeReader, ranges: list[ReadRange]) -> int:
    return sum([len(one.raw.data) async for one in reader.raw_batches(ranges)])


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    with tempfile.TemporaryDirectory() as folder:
        ranges = asyncio.run(filled(stage.s3.settings(BUCKET), Path(folder)))
    section = {**stage.storage(FAR), "cluster.id": CLUSTER_ID}
    lines = [f"{json.dumps(key)} = {json.dumps(value)}" for key, value in section.items()]
    config = parse_pipeline_config("\n".join(['[upstream]\n"bootstrap.servers" = "localhost:1"\n[storage]', *lines]))
    options = read_options(config, ExportRequest("small", TargetSettings("file:///nowhere")))
    reader = RangeReader(options, CLUSTER_ID)
    worker().run(read(reader, ranges[:1]))  # opens the store
    for number in range(stage.size.rounds):
        slowest_s = 0.0
        for way, ahead_bytes in WAYS.items():
            with mock.patch.object(range_read, "AHEAD_BYTES", ahead_bytes), Watch({}) as watch:
                size_bytes = worker().run(read(reader, ranges))
            slowest_s = slowest_s or watch.span.seconds
            figures = {
                "mb_per_s": size_bytes / watch.span.seconds / 1e6,
                "times_as_fast": slowest_s / watch.span.seconds,
            }
            result.readings.append(reading(CASE, way, number, figures, watch.span))
    return result


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
