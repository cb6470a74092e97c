"""`Spool.run` does not return while a thread still works on the caller's data."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiers.tasks.copy.spool import Spool, SpoolError


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path / "spool", 1 << 20, 1)
    yield spool
    spool.close()


@pytest.mark.parametrize("cancellations", [1, 2, 3])
async def test_a_cancelled_caller_waits_for_the_end_of_the_work(spool: Spool, cancellations: int) -> None:
    """A copy is ended, and cancelled once more when its process stops."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(120)
        done.set()

    caller = asyncio.create_task(spool.run(work))
    await asyncio.to_thread(begun.wait, 120)
    for _ in range(cancellations):
        caller.cancel()
        await asyncio.wait({caller}, timeout=0.01)
    waits = not caller.done()
    go_on.set()
    assert waits
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert done.is_set()


async def test_trouble_with_the_disk_names_the_folder(spool: Spool, tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("a file")
    with pytest.raises(SpoolError, match=str(tmp_path / "spool")):
        await spool.open()
