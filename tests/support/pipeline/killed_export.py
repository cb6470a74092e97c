"""Two exports that die in the middle, without a word to anybody:

    python -m tests.support.pipeline.killed_export CONFIG TOPIC HOME

To a table in `HOME/table`, after the files of the second wave, before its commit; to files in `HOME/files`, after the
second file of the second wave. Each is a process of its own, forked from one that has imported the job.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.config import load_pipeline_config
from pipeline.export.job import export_by
from pipeline.export.ledger import TileResult
from pipeline.export.plan import PlannedTile
from tests.support.pipeline.export_requests import to_files, to_table


class Place:
    """The parts of a stage that the tests' requests need."""

    def __init__(self, config: Path, topic: str) -> None:
        self.proxy = self
        self.config = config
        self.topic = topic


def export(config: Path, topic: str, home: Path) -> None:
    place: Any = Place(config, topic)
    waves = 0

    def run(what: str, plan: Sequence[PlannedTile], task: Any) -> list[TileResult]:
        nonlocal waves
        waves += 1
        results = []
        for one in plan:
            results.append(task(one))
            if waves == 2 and home.name == "files" and len(results) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        if waves == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return results

    request = to_table(place, home) if home.name == "table" else to_files(place, home)
    export_by(run, load_pipeline_config(config), request)


def main(config: str, topic: str, home: str) -> None:
    children = []
    for name in ("table", "files"):
        (Path(home) / name).mkdir()
        if (child := os.fork()) == 0:
            export(Path(config), topic, Path(home) / name)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [signal.SIGKILL, signal.SIGKILL]


if __name__ == "__main__":
    main(*sys.argv[1:])
