"""The topics of a job: a pattern without a match is a misuse, and a topic in doubt is named."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

import pytest

from pipeline import cli
from pipeline.chosen_partitions import NothingChosenError, chosen_partitions
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment
from tests.support.pipeline.job_bench import JobBench
from tiers.config.topic_policy import TopicPolicy


@pytest.fixture
async def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JobBench]:
    """One segment of the topic orders, which no rule tiers any more; the commands find it."""
    (tmp_path / "store").mkdir()
    made = JobBench(tmp_path / "store", tmp_path)
    await made.open()
    await made.store(build_segment(tmp_path / "0", [batch_of(0, 10)], base_offset=0))

    async def no_time(timeout_ms: int = 0) -> None: ...

    async def no_topics(tier: object) -> list[TopicPolicy]:
        return []

    @asynccontextmanager
    async def tier(*args: object, **options: object) -> AsyncIterator[object]:
        known = made.metadata
        yield SimpleNamespace(metadata=known, state=known.state, config=made.config, client=None, refresh=no_time)

    for job in ("merge", "retain", "rebuild"):
        monkeypatch.setattr(f"pipeline.maintenance.{job}.open_tier", tier)
        monkeypatch.setattr(f"pipeline.commands.{job}.load_pipeline_config", lambda file: made.config)
    monkeypatch.setattr("pipeline.maintenance.retain.job_services", lambda tier, folder: nullcontext(made.services))
    monkeypatch.setattr("pipeline.maintenance.retain.tiered_policies", no_topics)
    monkeypatch.setattr(
        "pipeline.maintenance.retain.ClusterTopicExistence", lambda client: Existence(made.partition.topic_id, True)
    )
    yield made
    await made.close()


class Existence:
    """The brokers say that the topic is gone, or do not agree."""

    def __init__(self, topic_id: UUID, is_doubtful: bool) -> None:
        self.topic_id, self.is_doubtful = topic_id, is_doubtful

    async def gone_and_doubtful(self, topic_ids: set[UUID], timeout_ms: int) -> tuple[set[UUID], set[UUID]]:
        named = topic_ids & {self.topic_id}
        return (set(), named) if self.is_doubtful else (named, set())


async def test_patterns_are_for_whole_names_and_refused_where_they_match_nothing(
    bench: JobBench, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chosen_partitions(bench.state, None) == chosen_partitions(bench.state, "ord.*") == [bench.partition]
    with pytest.raises(NothingChosenError):
        chosen_partitions(bench.state, "")
    for command, topics, said in (
        ("merge", "ord", "no topic in the remote tier matches 'ord'; did you mean orders?"),
        ("retain", "ord", "no topic in the remote tier matches 'ord'; did you mean orders?"),
        ("retain", "orders", "no tiered topic matches 'orders'"),
    ):
        arguments = [command, "--config", "tidegate.toml", "--topics", topics]
        assert await asyncio.to_thread(cli.run, arguments) == 2
        assert said in capsys.readouterr().err


async def test_a_topic_that_brokers_disagree_about_is_named_and_kept(
    bench: JobBench, capsys: pytest.CaptureFixture[str]
) -> None:
    named = f"orders ({bench.partition.topic_id})"
    arguments = ["retain", "--config", "tidegate.toml", "--deleted-topics"]
    assert await asyncio.to_thread(cli.run, arguments) == 0
    assert f"topic {named}: brokers do not agree whether it exists" in capsys.readouterr().err
    assert await asyncio.to_thread(cli.run, [*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer == {"applied": False, "partitions": [], "doubtful": [named], "unproved": []}


async def test_a_topic_is_deleted_by_proof_alone(
    bench: JobBench, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    topic_id = bench.partition.topic_id
    monkeypatch.setattr("pipeline.maintenance.retain.ClusterTopicExistence", lambda client: Existence(topic_id, False))
    arguments = ["retain", "--config", "tidegate.toml", "--deleted-topics"]
    assert await asyncio.to_thread(cli.run, arguments) == 0
    assert f"topic orders ({topic_id}): no broker knows it, and its deletion is not proved" in capsys.readouterr().err
    assert await asyncio.to_thread(cli.run, [*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["partitions"], answer["unproved"]) == ([], [f"orders ({topic_id})"])
    await bench.metadata.put_topic_deletion(topic_id, "orders", is_confirmed=True)
    assert await asyncio.to_thread(cli.run, [*arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert ([each["topic"] for each in answer["partitions"]], answer["unproved"]) == (["orders"], [])
