"""The rights that the proxy lacks, and the topics of which check counts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack

import pytest

from proxy.config import TidegateConfig
from proxy.process import own_rights
from proxy.process.live_settings import LiveSettings
from proxy.process.own_rights import OwnRights
from proxy.process.process_alarms import ProcessAlarms
from tests.support.proxy.parsed_config import parse_config
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient
from tiers.config.upstream_config import broker_client


def config_of(topic: str) -> TidegateConfig:
    return parse_config(
        '[upstream]\nbootstrap.servers = "127.0.0.1:1"\n[state]\npath = "state"\n'
        f'[storage]\nimplementation = "local"\nroot = "store"\n[[topics]]\npattern = "{topic}"\n'
    )


async def test_the_rights_for_the_last_topics_count(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    slow, ended = asyncio.Event(), asyncio.Event()

    async def missing(
        client: BrokerClient, config: TidegateConfig, timeout_ms: int
    ) -> tuple[Sequence[str], Sequence[str]]:
        (rule,) = config.topics
        asked.append(rule.pattern)
        if rule.pattern == "slow":
            try:
                await slow.wait()
            finally:
                ended.set()
        return (), [f"READ on {rule.pattern}"]

    monkeypatch.setattr(own_rights, "missing_permissions", missing)
    live, alarms = LiveSettings(config_of("first")), ProcessAlarms()
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        await OwnRights(broker_client(live.config.upstream), live, alarms).open(stack)
        live.change(config_of("slow"))
        await until(lambda: asked == ["first", "slow"])
        live.change(config_of("last"))
        await until(lambda: "READ on last" in said(alarms))
        slow.set()
        await ended.wait()
        assert said(alarms).endswith("READ on last")


def said(alarms: ProcessAlarms) -> str:
    return ", ".join(each.detail for each in alarms.raised())
