"""An offload on Spark's own cluster of two executors, one of which dies at its first task; later the run hangs.

    python -m tests.pipeline.killed_offload CONFIG FOLDER

`FOLDER/executor-killed` appears before the executor dies, its objects written; `FOLDER/under-way` when a later wave has
objects in the store and never ends: then whoever waits for it kills the driver.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pipeline.config import load_pipeline_config
from pipeline.job import attempt, run_tasks
from pipeline.jobs.offload import run_offload
from pipeline.offload_driver import OffloadOptions
from pipeline.offload_task import OffloadResult, OffloadTask, copy_tiles
from pipeline.session import spark_session


def copy_and_die(folder: str, task: OffloadTask) -> OffloadResult:
    result = copy_tiles(task)
    killed, under_way = Path(folder) / "executor-killed", Path(folder) / "under-way"
    if task.partition.partition == 0 and attempt() == 0 and not killed.exists():
        killed.touch()
        os.kill(executor(), signal.SIGKILL)
        time.sleep(600)
    if task.tiles[0].lo > 100:
        under_way.touch()
        time.sleep(600)
    return result


def executor() -> int:
    """The JVM above this Python process."""
    pid = os.getpid()
    while b"CoarseGrainedExecutorBackend" not in Path(f"/proc/{pid}/cmdline").read_bytes():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def main(config: str, folder: str) -> None:
    session = spark_session("local-cluster[2,1,1024]", {"spark.executor.memory": "512m"})

    def run(tasks: Sequence[OffloadTask]) -> list[OffloadResult]:
        return run_tasks(session, "offload", tasks, partial(copy_and_die, folder))

    options = OffloadOptions(max_age_ms=0, wave_bytes=100_000)
    run_offload(load_pipeline_config(Path(config)), options, run, 2)


if __name__ == "__main__":
    main(*sys.argv[1:])
