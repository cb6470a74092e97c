"""What a job's write does while the metadata cannot be written: it waits, says so, and ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline.job_services import PAUSES_S, NotWrittenError, written
from tests.tiers.manager.workbench import PARTITION, Workbench, workbench
from tiers.errors import InvalidTransitionError, OwnershipLostError, RemoteLogMetadataError


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Workbench]:
    async with workbench(tmp_path) as bench:
        yield bench


class Write:
    """Fails so often, and waits for nothing."""

    def __init__(self, failures: int, error: type[RemoteLogMetadataError] = RemoteLogMetadataError) -> None:
        self.failures, self.error = failures, error
        self.attempts = 0
        self.pauses_s: list[float] = []

    async def __call__(self) -> str:
        self.attempts += 1
        if self.attempts <= self.failures:
            raise self.error("TOPIC_AUTHORIZATION_FAILED")
        return "written"

    async def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)
        await asyncio.sleep(0)


async def test_a_write_that_fails_for_good_is_said_and_ends(
    bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Write(1000)
    with pytest.raises(NotWrittenError, match="cannot be written: TOPIC_AUTHORIZATION_FAILED"):
        await written(bench.services, PARTITION, write, sleep=write.sleep)
    assert write.attempts == len(PAUSES_S) + 1
    assert write.pauses_s == [*PAUSES_S]
    [said] = capsys.readouterr().err.splitlines()
    assert "which is tried again: TOPIC_AUTHORIZATION_FAILED" in said


async def test_a_write_that_fails_for_a_moment_is_done_without_a_word(
    bench: Workbench, capsys: pytest.CaptureFixture[str]
) -> None:
    write = Write(2)
    assert await written(bench.services, PARTITION, write, sleep=write.sleep) == "written"
    assert capsys.readouterr().err == ""


async def test_what_may_not_be_written_is_not_tried_again(bench: Workbench) -> None:
    write = Write(1000, InvalidTransitionError)
    with pytest.raises(InvalidTransitionError):
        await written(bench.services, PARTITION, write, sleep=write.sleep)
    assert write.attempts == 1


async def test_who_loses_the_ownership_by_a_failed_write_says_what_failed(bench: Workbench) -> None:
    write = Write(1000)

    async def pause(seconds: float) -> None:
        bench.metadata.owned = False
        await asyncio.sleep(0)

    with pytest.raises(NotWrittenError, match="TOPIC_AUTHORIZATION_FAILED"):
        await written(bench.services, PARTITION, write, 0, sleep=pause)
    with pytest.raises(OwnershipLostError):
        await written(bench.services, PARTITION, write, 0, sleep=write.sleep)
    assert write.attempts == 1
