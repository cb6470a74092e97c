"""The proxy's own rights are checked again when the topics change and while one is missing. The last topics count."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack

import pytest

from proxy.config import TidegateConfig
from proxy.process.admin.process_alarms import ProcessAlarms
from proxy.process.checks import own_rights
from proxy.process.checks.own_rights import AGAIN_AFTER_S, OwnRights
from proxy.process.live_settings import LiveSettings
from tests.support.proxy.parsed_config import parse_config
from tests.support.simulation.loop import VirtualLoop
from tiers.access.open_tier import RemoteTierError
from tiers.config.upstream_config import broker_client
from tiers.errors import BrokerError

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
        self.grants_all = False
        self.is_down = False
        self.checks = 0
        monkeypatch.setattr(own_rights, "missing_permissions", self.missing)

    async def missing(self, client: object, config: TidegateConfig, timeout_ms: int) -> tuple[list[str], list[str]]:
        self.checks += 1
        if self.is_down:
            raise BrokerError("no broker answers")
        topic = config.topics[0].pattern
        if topic == "slow":
            await self.slow.wait()
        return self.essential, [] if self.grants_all else [f"READ on {topic}"]


async def test_a_late_answer_about_earlier_topics_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers, live, alarms = Brokers(monkeypatch), LiveSettings(config("first")), ProcessAlarms()
    async with AsyncExitStack() as stack:
        await OwnRights(broker_client(live.config.upstream), live, alarms).open(stack)
        live.change(config("slow"))
        await asyncio.sleep(0)
        live.change(config("last"))
        await asyncio.sleep(0)
        brokers.slow.set()
        for _ in range(5):
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
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(alarms.raised()) == 2
    async with AsyncExitStack() as stack:
        with pytest.raises(RemoteTierError, match="lacks WRITE on __remote_log_metadata"):
            await rights.open(stack)


def in_virtual_time(main: Callable[[], Coroutine[None, None, None]]) -> None:
    loop = VirtualLoop()
    loop.run_until_complete(main())
    loop.close()


def test_the_alarm_ends_after_an_operator_has_given_the_right(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers, live, alarms = Brokers(monkeypatch), LiveSettings(config("first")), ProcessAlarms()

    async def main() -> None:
        async with AsyncExitStack() as stack:
            await OwnRights(broker_client(live.config.upstream), live, alarms).open(stack)
            await asyncio.sleep(AGAIN_AFTER_S * 2.5)
            assert (len(alarms.raised()), brokers.checks) == (1, 3)
            brokers.grants_all = True
            await asyncio.sleep(AGAIN_AFTER_S)
            assert (len(alarms.raised()), brokers.checks) == (0, 4)
            await asyncio.sleep(AGAIN_AFTER_S * 10)
            assert brokers.checks == 4  # a proxy with all rights does not ask again

    in_virtual_time(main)


def test_rights_that_could_not_be_read_are_read_later(monkeypatch: pytest.MonkeyPatch) -> None:
    brokers, live, alarms = Brokers(monkeypatch), LiveSettings(config("first")), ProcessAlarms()
    brokers.is_down = True

    async def main() -> None:
        async with AsyncExitStack() as stack:
            await OwnRights(broker_client(live.config.upstream), live, alarms).open(stack)
            assert not alarms.raised()
            brokers.is_down = False
            await asyncio.sleep(AGAIN_AFTER_S * 1.5)
            assert len(alarms.raised()) == 1

    in_virtual_time(main)
