"""Drivers that are killed in their first wave: `before` anything counts, `within` the second commit, `behind` the last.

    python -m tests.support.pipeline.killed_driver FOLDER

By `FOLDER/WHERE/config.toml`, all at once; each is a process of its own, forked from one that has imported all.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from pipeline.config import load_pipeline_config
from pipeline.offload.commit import OffloadCommitter
from pipeline.offload.driver import OffloadDriver, OffloadOptions
from pipeline.offload.job import run_offload
from tests.support.pipeline.offload_rig import CLAIM_TIMEOUT_MS, in_process
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.tasks.task_services import TaskServices

PLACES = ("before", "within", "behind")


async def die(*arguments: object, **more: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_within(write_state: Callable[..., Coroutine[None, None, None]]) -> Callable[..., Coroutine[None, None, None]]:
    """The second segment is already announced by its name, and not finished."""
    finished = set[RemoteLogSegmentId]()

    async def write(services: TaskServices, segment: RemoteLogSegmentMetadata, state: RemoteLogSegmentState) -> None:
        finished.add(segment.segment_id)  # once each, however often it is tried
        if len(finished) == 2:
            await die()
        await write_state(services, segment, state)

    return write


def offload(config: Path, where: str) -> None:
    match where:
        case "before":
            OffloadDriver.commit = die  # type: ignore[method-assign]  # and dies
        case "within":
            TaskServices.write_state = die_within(TaskServices.write_state)  # type: ignore[method-assign]  # and dies
        case _:
            OffloadCommitter._end = die  # type: ignore[method-assign]  # and dies
    options = OffloadOptions(max_age_ms=0, claim_timeout_ms=CLAIM_TIMEOUT_MS)
    run_offload(load_pipeline_config(config), options, in_process, 2)


def main(folder: str) -> None:
    children = []
    for where in PLACES:
        if (child := os.fork()) == 0:
            offload(Path(folder, where, "config.toml"), where)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [signal.SIGKILL] * len(children)


if __name__ == "__main__":
    main(*sys.argv[1:])
