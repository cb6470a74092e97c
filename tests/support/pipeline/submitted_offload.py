"""The program that spark-submit runs where only a zip has Tidegate: an offload, a DataFrame, another offload.

    spark-submit --py-files tidegate.zip submitted_offload.py TOPIC CONFIG FOLDER CONFIG FOLDER

* Of the first offload, the attempt at partition 0 that is the first to have written its objects is then slow until
  Spark ends it: `FOLDER/slow` names them. `FOLDER/said` has what came of it, and what was read.
* Of the second one, the first executor dies at partition 0, its objects written: `FOLDER/executor-killed` names them.
  `FOLDER/under-way` appears when a later wave has objects in the store and never ends: then whoever waits for it kills
  the driver.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from pyspark.sql import SparkSession

import pipeline
import pipeline.offload.job
import tidegate
from pipeline.config import load_pipeline_config
from pipeline.offload.driver import OffloadOptions, OffloadReport
from pipeline.offload.task import OffloadResult, OffloadTask, copy_tiles
from pipeline.spark.runner import SparkRunner
from pipeline.spark.session import open_session
from protocol.message_schema import load_schema
from tiers.config.managers import STORAGE_GROUP, installed_names

SLOW_S = 1200.0
CLAIM_TIMEOUT_MS = 180_000


def copy_slowly_at_first(folder: str, task: OffloadTask) -> OffloadResult:
    from pipeline.decode.arrow_records import warm  # of the zip, on an executor

    assert Path(pipeline.__file__).parents[1].name == "tidegate.zip"
    assert warm()
    result = copy_tiles(task)
    if task.partition.partition == 0 and is_first(Path(folder, "slow"), names(result)):
        time.sleep(SLOW_S)
        Path(folder, "came-to-its-end").touch()
    return result


def copy_and_die(folder: str, task: OffloadTask) -> OffloadResult:
    result = copy_tiles(task)
    if task.partition.partition == 0 and is_first(Path(folder, "executor-killed"), names(result)):
        os.kill(executor(), signal.SIGKILL)
        time.sleep(SLOW_S)
    if task.plan.bounds[0] > 100:
        Path(folder, "under-way").touch()
        time.sleep(SLOW_S)
    return result


def is_first(file: Path, text: str) -> bool:
    """One of the attempts. Spark may start a slow attempt twice, and end one of them."""
    try:
        with file.open("x") as opened:
            opened.write(text)
    except FileExistsError:
        return False
    return True


def names(result: OffloadResult) -> str:
    return "\n".join(str(one.segment.segment_id.id) for one in result.copied)


def executor() -> int:
    """The JVM above this Python process."""
    pid = os.getpid()
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def offload(
    session: SparkSession,
    copy: Callable[[str, OffloadTask], OffloadResult],
    config: str,
    folder: str,
    options: OffloadOptions,
) -> OffloadReport:
    pipeline.offload.job.copy_tiles = partial(copy, folder)  # type: ignore[attr-defined]  # in trouble
    return pipeline.offload.job.offload(load_pipeline_config(Path(config)), SparkRunner(session), options)


def read(session: SparkSession, topic: str, config: str) -> dict[int, str]:
    """The hash of each partition's values, in the order of their offsets."""
    rows = sorted(tidegate.read(session, topic, "partition,offset,value", config=config).collect())
    return {
        partition: hashlib.sha256(b"".join(row.value for row in rows if row.partition == partition)).hexdigest()
        for partition in {row.partition for row in rows}
    }


def main(topic: str, config: str, folder: str, next_config: str, next_folder: str) -> None:
    with open_session() as session:
        options = OffloadOptions(max_age_ms=0, claim_timeout_ms=CLAIM_TIMEOUT_MS)
        report = offload(session, copy_slowly_at_first, config, folder, options)
        said = {
            "master": session.sparkContext.master,
            "troubles": [one.error for one in report.troubles],
            "waves": report.waves,
            "segments": sum(one.segments for one in report.partitions),
            "values": read(session, topic, config),
            "schema": load_schema("ShareFetchResponse").name,
            "stores": installed_names(STORAGE_GROUP),
        }
        writing = Path(folder, "said.part")
        writing.write_text(json.dumps(said))
        writing.rename(Path(folder, "said"))
        offload(session, copy_and_die, next_config, next_folder, replace(options, wave_bytes=100_000))


if __name__ == "__main__":
    main(*sys.argv[1:])
