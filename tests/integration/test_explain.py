"""`tidegate explain` on a real cluster: where records are, and why, with and without the broker and the store."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.tier_command import Answer, run, tidegate_here
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import tidegate_over
from tiers.commands.console import FAILED, MISUSED

pytestmark = [pytest.mark.integration, pytest.mark.full]
RECORDS = 2_000


class Operator:
    def __init__(self, config: Path) -> None:
        self.config = config

    async def explain(self, *arguments: str) -> Answer:
        return await tidegate_here(self.config, "explain", *arguments)

    async def json(self, *arguments: str) -> Any:
        code, out, err = await self.explain(*arguments, "--json")
        assert (code, err) == (0, "")
        (answer,) = json.loads(out)
        return answer

    async def reasons(self, topic: str) -> list[list[str]]:
        answer = await self.json(topic)
        return [[why["reason"] for why in segment["whys"]] for segment in answer["partition"]["segments"]]


async def test_an_operator_asks_where_and_why(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    proxy = tidegate_over(
        kafka,
        tmp_path,
        tiered=[topic_name],
        segment_bytes=400_000,
        settings={
            "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
            "remote.log.visible.after.ms": 1000,
        },
    )
    config = tmp_path / "operator.toml"
    config.write_text(proxy.config.read_text())
    operator = Operator(config)
    with proxy:
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, random_values(RECORDS))
        await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS // 2)
        await asyncio.to_thread(until, partial(_is_settled, operator, topic_name))
        answer = (await operator.json(topic_name))["partition"]
        start = answer["local_log_start"]
        assert (answer["log_start"], answer["remote_start"], answer["high_watermark"]) == (0, 0, RECORDS)
        assert answer["owner"].startswith("127.0.0.1 (tidegate-")
        assert answer["notes"] == []
        newest = answer["segments"][-1]
        assert (newest["place"], [why["reason"] for why in newest["whys"]]) == (
            "both",
            ["newest-segment", "total-retention"],
        )
        assert "7 d" in answer["segments"][0]["whys"][-1]["sentence"]

        code, out, err = await operator.explain(f"{topic_name}:0", "--offset", "0")
        assert (code, err) == (0, "")
        assert "The remote tier has offset 0, in the segment" in out
        (key,) = [line.removeprefix("  Object: ") for line in out.splitlines() if line.startswith("  Object: ")]
        assert (tmp_path / "tier" / key).is_file()
        code, out, _ = await operator.explain(topic_name, "--offset", str(start))
        assert (code, "Both tiers have offset" in out) == (0, True)
        code, out, _ = await operator.explain(topic_name, "--offset", str(RECORDS))
        assert (code, f"the next record gets offset {RECORDS}" in out) == (1, True)

        found = await operator.json(topic_name, "--time", "2001-01-01T00:00:00Z")
        assert (found["offset"]["offset"], found["offset"]["place"]) == (0, "remote")
        code, out, _ = await operator.explain(topic_name, "--time", "2100-01-01")
        assert (code, "No record is of 2100-01-01T00:00:00+00:00 or later." in out) == (1, True)
        code, out, _ = await operator.explain(topic_name)
        assert (code, "Why still on the broker: The newest copied segment always stays on the broker." in out) == (
            0,
            True,
        )

        code, _, _ = await tidegate_here(config, "tier", "pause", topic_name, "--copying", "--yes")
        assert code == 0
        await asyncio.to_thread(until, lambda: "an operator paused work on a topic" in proxy.output.read_text())
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, random_values(3))
        rest = (await operator.json(topic_name))["partition"]["uncopied"]
        assert (rest["first_offset"], rest["next_offset"]) == (RECORDS, RECORDS + 3)
        assert [why["reason"] for why in rest["whys"]] == ["copying-paused"]

    answer = (await operator.json(topic_name))["partition"]
    assert (answer["owner"], "No running process owns the partition" in " ".join(answer["notes"])) == ("", True)
    (tmp_path / "tier").rename(tmp_path / "gone")
    answer = (await operator.json(topic_name))["partition"]
    assert "The store cannot be used" in " ".join(answer["notes"])
    assert len(answer["segments"]) > 1
    for command in ("topics", f"segments {topic_name}"):
        code, out, err = await run(config, *command.split())
        assert (code, err) == (0, ""), "the command reads the metadata alone"
        assert topic_name in out
    (tmp_path / "tier").mkdir()
    code, out, _ = await tidegate_here(config, "check")
    assert code == 1
    assert f"problem: [storage] the store lacks the newest segment of {topic_name}-0, in a sample of 1. " in out
    for arguments, said in (
        (["no-such-topic"], "the cluster has no topic no-such-topic"),
        ([f"{topic_name}:7"], f"{topic_name} has no partition 7: it has 1, from 0 on"),
    ):
        see = "See: tidegate explain --help"
        assert await operator.explain(*arguments) == (MISUSED, "", f"tidegate: Invalid value: {said}. {see}\n")
    config.write_text(config.read_text().replace(kafka.bootstrap_servers, "127.0.0.1:1"))
    code, out, err = await operator.explain(topic_name)
    assert (code, out, err.count("\n")) == (FAILED, "", 1)
    assert err.startswith("tidegate: no broker answers at 127.0.0.1:1: ")


def _is_settled(operator: Operator, topic: str) -> bool:
    """Whether everything is copied, and all but the newest segment is trimmed."""
    answer = asyncio.run(operator.json(topic))["partition"]
    newest = answer["segments"][-1] if answer["segments"] else None
    return newest is not None and (newest["end_offset"], newest["start_offset"]) == (
        RECORDS - 1,
        answer["local_log_start"],
    )
