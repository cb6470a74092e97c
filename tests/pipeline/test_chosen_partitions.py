"""The topics of a job: a pattern without a match is a misuse."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from pipeline import cli
from pipeline.chosen_partitions import NothingChosenError, chosen_partitions
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment
from tests.support.pipeline.job_bench import JobBench


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobBench]:
    """One segment of the topic orders, which no rule tiers any more; the commands find it."""
    (tmp_path / "store").mkdir()
    made = JobBench(tmp_path / "store", tmp_path)
    await made.open()
    await made.store(build_segment(tmp_path / "0", [batch_of(0, 10)], base_offset=0))

    async def no_time(timeout_ms: int = 0) -> None: ...

    @asynccontextmanager
    async def tier(*args: object, **options: object) -> AsyncIterator[object]:
        known = made.metadata
        yield SimpleNamespace(metadata=known, state=known.state, config=made.config, client=None, refresh=no_time)

    for job in ("merge", "rebuild"):
        monkeypatch.setattr(f"pipeline.maintenance.{job}.open_tier", tier)
        monkeypatch.setattr(f"pipeline.commands.{job}.load_pipeline_config", lambda file: made.config)
    yield made
    await made.close()


async def test_patterns_are_for_whole_names_and_refused_where_they_match_nothing(
    bench: JobBench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen_partitions(bench.state, None) == chosen_partitions(bench.state, "ord.*") == [bench.partition]
    with pytest.raises(NothingChosenError):
        chosen_partitions(bench.state, "")
    arguments = ["merge", "--config", "tidegate.toml", "--topics", "ord"]
    assert await asyncio.to_thread(cli.run, arguments) == 2
    assert "no topic in the remote tier matches 'ord'; did you mean orders?" in capsys.readouterr().err
