"""The page of a real proxy with workers before a real cluster."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.clients.client import READ_UNCOMMITTED
from tests.support.clients.librdkafka import Librdkafka
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = [pytest.mark.integration, pytest.mark.full]
RECORDS = 2_000


class Operator:
    """Somebody with a browser, and a program that asks the API."""

    def __init__(self, proxy: TidegateProcess) -> None:
        self._url = f"http://{proxy.admin[0]}:{proxy.admin[1]}"

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self._url + path, timeout=30) as answer:
            return str(answer.read().decode())

    def json(self, path: str) -> Any:
        return json.loads(self.text(f"/api/v1{path}"))


async def test_an_operator_sees_both_tiers(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    settings: dict[str, str | int] = {
        "workers": 2,
        "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
        "remote.log.visible.after.ms": 1000,
    }
    proxy = tidegate_over(kafka, tmp_path, tiered=[topic_name], segment_bytes=400_000, settings=settings)
    with proxy:
        await asyncio.to_thread(produce, proxy.bootstrap_servers, topic_name, random_values(RECORDS))
        await asyncio.to_thread(until_trimmed, kafka, topic_name, RECORDS // 2)
        operator = Operator(proxy)
        await asyncio.to_thread(until, partial(_is_seen, operator, topic_name))

        (topic,) = operator.json("/topics")["topics"]
        assert topic["state"] == "tiered"
        assert topic["bytes"]["remote_only"] > RECORDS // 2 * 1000
        sources = {each["key"]: each["source"] for each in topic["settings"]}
        assert (sources["local.retention.bytes"], sources["local.retention.ms"]) == ("file", "default")

        partition = operator.json(f"/topics/{topic_name}/0")
        assert partition["line"]["is_owned"]
        assert partition["line"]["local_start"] >= RECORDS // 2
        assert {each["why"]["reason"] for each in partition["whys"]} >= {"total-retention", "newest-segment"}
        page = operator.text(f"/topics/{topic_name}/0")
        assert "The newest copied segment always stays on the broker." in page

        client = Librdkafka()
        await asyncio.to_thread(client.read, proxy.bootstrap_servers, topic_name, 0, RECORDS, READ_UNCOMMITTED)
        (reader,) = operator.json("/readers")["readers"]
        assert (reader["topic"], reader["throttled"]) == (topic_name, 0)
        assert reader["bytes"] >= topic["bytes"]["remote_only"]

        overview = operator.json("/overview")
        names = ["worker-1", "worker-2", "remote-log", "remote-reader"]
        assert [each["name"] for each in overview["processes"]] == names
        assert {each["state"] for each in overview["processes"]} == {"SERVING"}
        assert overview["alarms"] == []
        (owner,) = overview["cluster"]["owners"]
        assert (owner["is_this"], owner["partitions"]) == (True, 1)
        assert [each["node_id"] for each in overview["cluster"]["brokers"]] == [1]
        (store,) = overview["stores"]
        assert (store["store"], overview["outages"]) == ("local", [])
        assert store["requests"] > 0
        for path in ("/", "/topics", f"/topics/{topic_name}", "/readers", "/settings", "/errors"):
            assert "<!doctype html>" in operator.text(path)
        assert 'tidegate_remote_client_read_bytes_total{client_id="rdkafka"' in operator.text("/metrics")


def _is_seen(operator: Operator, topic: str) -> bool:
    """Whether the page shows the trim: a look is some seconds old."""
    line = operator.json(f"/topics/{topic}/0")["line"]
    return bool(line["local_start"] >= RECORDS // 2 and line["backlog_offsets"] == 0)
