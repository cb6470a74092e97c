"""The proxy's own rights are checked again when the topics change, and the last topics count."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from proxy.config import TidegateConfig
from proxy.process import own_rights
from proxy.process.admin.process_alarms import ProcessAlarms
from proxy.process.live_settings import LiveSettings
from proxy.process.own_rights import OwnRights
from tests.support.proxy.parsed_config import parse_config
from tiers.access.open_tier import RemoteTierError
from tiers.config.upstream_config import broker_client

BASE = """
[upstream]
bootstrap.servers = "a:1"
[listener]
advertised.host = "h"
bootstrap.port = 1
[state]
path = "state"
[storage]
implementation = "local"
path = "tier"
"""


def config(*patterns: str) -> TidegateConfig:
    return parse_config(BASE + "".join(f'[[topics]]\npattern = "{each}"\n' for each in patterns))


class Brokers:
    """What the brokers say of the rights on the first topic of the settings. They may be slow about a topic."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slow = asyncio.Event()
        self.essential: list[str] = []
        monkeypatch.setattr(own_rights, "missing_permissions", self.missing)

    async def missing(self, client: object, config: TidegateConfig, timeout_ms: int) -> tuple[list[str], list[str]]:
        topic = config.topics[0].pattern
        if topic == "slow":
            await self.slow.wait()
        return self.essential, [f"READ on {topic}"]


async def test_a_late_answer_about_earlier_topics_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers, live, alarms = Brokers(monkeypatch), LiveSettings(config("first")), ProcessAlarms()
    async with AsyncExitStack() as stack:
        await OwnRights(broker_client(live.config.upstream), live, alarms).open(stack)
        live.change(config("slow"))
        await asyncio.sleep(0)
        live.change(config("last"))
        await asyncio.sleep(0)
        brokers.slow.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert [each.detail for each in alarms.raised()] == ["the proxy, without [upstream.sasl], lacks READ on last"]


async def test_an_essential_right_that_is_missing_later_is_an_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start, it ends the process."""
    brokers, live, alarms = Brokers(monkeypatch), LiveSettings(config("first")), ProcessAlarms()
    rights = OwnRights(broker_client(live.config.upstream), live, alarms)
    async with AsyncExitStack() as stack:
        await rights.open(stack)
        brokers.essential = ["WRITE on __remote_log_metadata"]
        live.change(config("last"))
        await asyncio.sleep(0)
        assert len(alarms.raised()) == 2
    async with AsyncExitStack() as stack:
        with pytest.raises(RemoteTierError, match="lacks WRITE on __remote_log_metadata"):
            await rights.open(stack)
