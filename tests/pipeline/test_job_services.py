"""A job waits and reports it while the metadata cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.job_services import PAUSES_S, NotWrittenError, written
from tests.support.tiers.recorded_progress import RecordedProgress
from tests.support.tiers.workbench import PARTITION, Workbench, workbench
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


async def test_a_permanent_failure_of_a_write_is_reported(bench: Workbench) -> None:
    write, told = Write(1000), RecordedProgress()
    services = replace(bench.services, say=told.say)
    with pytest.raises(NotWrittenError, match="cannot be written: TOPIC_AUTHORIZATION_FAILED"):
        await written(services, PARTITION, write, sleep=write.sleep)
    assert write.attempts == len(PAUSES_S) + 1
    assert write.pauses_s == [*PAUSES_S]
    [said] = told.said
    assert "and is retried: TOPIC_AUTHORIZATION_FAILED" in said


async def test_a_write_is_retried_without_a_word_unless_it_is_forbidden(bench: Workbench) -> None:
    write, told = Write(2), RecordedProgress()
    assert await written(replace(bench.services, say=told.say), PARTITION, write, sleep=write.sleep) == "written"
    assert told.said == []
    write = Write(1000, InvalidTransitionError)
    with pytest.raises(InvalidTransitionError):
        await written(bench.services, PARTITION, write, sleep=write.sleep)
    assert write.attempts == 1


async def test_an_ownership_lost_by_a_failed_write_names_the_failure(bench: Workbench) -> None:
    write = Write(1000)

    async def pause(seconds: float) -> None:
        bench.metadata.owned = False
        await asyncio.sleep(0)

    with pytest.raises(NotWrittenError, match="TOPIC_AUTHORIZATION_FAILED"):
        await written(bench.services, PARTITION, write, 0, sleep=pause)
    with pytest.raises(OwnershipLostError):
        await written(bench.services, PARTITION, write, 0, sleep=write.sleep)
    assert write.attempts == 1
