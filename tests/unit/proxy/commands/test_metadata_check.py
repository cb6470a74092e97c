"""`tidegate check` compares the metadata topic with the saved state and with the store, and creates nothing."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock
from uuid import UUID

import pytest

from protocol.api_keys import ApiKey
from proxy.commands.check import check, metadata_topic_trouble
from proxy.commands.store_check import absent_segments
from proxy.config import TidegateConfig
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.proxy.command_bench import CommandBench
from tests.support.proxy.parsed_config import parse_config
from tests.support.tiers.metadata_state import fill
from tests.support.tiers.segment_metadata import segment
from tiers.broker.client import BrokerClient
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentState

LOST = "see 'The metadata topic is lost' in docs/recovery.md"


def config_of(bench: CommandBench, broker: ScriptedBroker) -> TidegateConfig:
    return parse_config(f"""
remote.log.metadata.topic.name = "segments"
[upstream]
bootstrap.servers = "127.0.0.1:{broker.port}"
[state]
path = "{bench.folder}/state"
[storage]
implementation = "local"
path = "{bench.root}"
[[topics]]
name = "orders"
""")


async def trouble_of(bench: CommandBench, *, has_store: bool = True) -> str | None:
    async with ScriptedBroker() as broker:
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
        found = await metadata_topic_trouble(
            config_of(bench, broker), client, broker.cluster_id, 5_000, has_store=has_store
        )
        await client.close()
        assert ApiKey.CREATE_TOPICS not in {request.API_KEY for request in broker.requests}
    return found


async def test_a_new_cluster_needs_no_metadata_topic(bench: CommandBench) -> None:
    assert await trouble_of(bench) is None
    assert not (bench.folder / "state").exists()


async def test_segments_without_a_metadata_topic_are_a_problem(
    bench: CommandBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.stored(0)
    said = "topic segments is missing or has no record, but the store holds segments of this cluster"
    assert await trouble_of(bench) == f"{said}: {LOST}"
    monkeypatch.setattr("proxy.commands.check.missing_permissions", AsyncMock(return_value=([], [])))
    async with ScriptedBroker() as broker:
        report = await check(config_of(bench, broker))
    assert len([problem for problem in report.problems if LOST in problem]) == 1


async def test_a_saved_state_without_its_metadata_topic_is_a_problem(bench: CommandBench) -> None:
    folder = bench.folder / "state" / "metadata"
    folder.mkdir(parents=True)
    fill(folder)
    said = f"there is no topic segments, and the saved state was read from one: {LOST}"
    assert await trouble_of(bench) == said
    assert await trouble_of(bench, has_store=False) == said


async def test_a_store_that_cannot_be_listed_leaves_no_silence(bench: CommandBench) -> None:
    bench.root.rename(bench.folder / "elsewhere")
    assert "topic segments has no record, and the store cannot be listed: " in str(await trouble_of(bench))
    assert await trouble_of(bench, has_store=False) is None


@pytest.mark.parametrize(("partitions", "sample"), [(5, "orders-0, orders-1, orders-2, in a sample of 3"), (0, None)])
async def test_a_store_without_the_newest_segments_is_another_place(
    bench: CommandBench, partitions: int, sample: str | None
) -> None:
    known = [TopicIdPartition(UUID(int=1), number, "orders") for number in range(partitions)]

    def segments(partition: TopicIdPartition) -> list[object]:
        return [replace(segment(partition, 0, 9), state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED)]

    metadata = SimpleNamespace(partitions=lambda: known, list_remote_log_segments=segments)
    async with ScriptedBroker() as broker:
        said = await absent_segments(config_of(bench, broker), "cluster", cast(Any, metadata))
    assert [each.partition(".")[0] for each in said] == (
        [] if sample is None else [f"the store lacks the newest segment of {sample}"]
    )
