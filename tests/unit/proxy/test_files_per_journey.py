"""In how many files of the product the code of one copy, and of one remote Fetch, is.

Somebody who follows a record through the product reads these files. The brokers and the metadata log are fakes."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.proxy.scenario import scenario
from tests.support.repository import ROOT
from tests.support.tiers.workbench import PARTITION, POLICY, workbench
from tiers.metadata.metadata_log import Tenure
from tiers.tasks.partition_tasks import PartitionTasks

PACKAGES = tuple(str(ROOT / package) + "/" for package in ("protocol", "tiers", "proxy"))


class Walk:
    """Notes the files of the functions that are called within `begun`, in all threads that began meanwhile."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self._is_begun = False

    def note(self, frame: FrameType, event: str, argument: object) -> None:
        if self._is_begun and event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            self.files.add(frame.f_code.co_filename.removeprefix(f"{ROOT}/"))

    @contextmanager
    def begun(self) -> Iterator[None]:
        self._is_begun = True
        try:
            yield
        finally:
            self._is_begun = False


@pytest.fixture
def walk() -> Iterator[Walk]:
    made = Walk()
    threading.setprofile(made.note)
    sys.setprofile(made.note)
    try:
        yield made
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def test_files_of_a_copy(tmp_path: Path, walk: Walk) -> None:
    """The second copy of an owner, from the round that finds the records due to COPY_SEGMENT_FINISHED."""
    async with workbench(tmp_path) as bench:
        tasks = PartitionTasks(bench.services, PARTITION, POLICY, Tenure(0, 1))

        async def copied() -> None:
            bench.log.append(*(batch_of(bench.log.end_offset + 10 * each, 10, value_bytes=15) for each in range(4)))
            before = len(bench.finished)
            surveyed = await tasks.round()
            assert surveyed is not None
            await tasks.run_copy(surveyed)
            assert len(bench.finished) == before + 1

        await copied()
        with walk.begun():
            await copied()
    assert len(walk.files) <= 44, sorted(walk.files)


async def test_files_of_a_remote_fetch(tmp_path: Path, walk: Walk) -> None:
    """The first Fetch of a connection, in the relay and in the remote reader."""
    async with scenario(tmp_path, is_reader_apart=True) as made, made.client() as client:
        with walk.begun():
            answer = await client.fetch(16, 0, max_wait_ms=60_000)
        assert answer[0].records
    assert len(walk.files) <= 66, sorted(walk.files)
