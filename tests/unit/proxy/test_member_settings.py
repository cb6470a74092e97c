"""Proxies of one cluster with different `[[topics]]` or `[storage]` raise an alarm, until they have the same."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, cast

import pytest

from proxy.config import TidegateConfig
from proxy.process import member_settings
from proxy.process.live_settings import LiveSettings
from proxy.process.member_settings import INTERVAL_S, compare_members
from tests.support.proxy.parsed_config import parse_config
from tests.support.simulation.loop import VirtualLoop
from tiers.errors import BrokerError
from tiers.metadata.topic.group.assignor import differing
from tiers.metadata.topic.group.group_members import OwnerMember

BASE = '[upstream]\nbootstrap.servers = "a:1"\n'
STORE = '[storage]\nimplementation = "s3"\nbucket = "b"\n'
LOCATION = '[[storage.locations]]\nname = "east"\nbucket = "e"\n'
OTHER = '[[storage.locations]]\nname = "west"\nbucket = "w"\n'
TOPICS = '[[topics]]\npattern = "orders-*"\n'


def config(text: str = STORE + TOPICS) -> TidegateConfig:
    return parse_config(BASE + text)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        (STORE + TOPICS, ""),
        (STORE + 'access.key.id = "k"\nsecret.access.key = "s"\nmax.concurrency = 8\n' + TOPICS, ""),
        (STORE + 'prefix = "/"\n' + TOPICS, ""),
        (STORE + TOPICS + "segment.bytes = 268435456\n", ""),
        (STORE + TOPICS + 'local.retention.ms = "1h"\n', "[[topics]]"),
        (STORE + '[[topics]]\npattern = "payments"\n', "[[topics]]"),
        (STORE.replace('"b"', '"c"') + TOPICS, "[storage]"),
        (STORE + LOCATION, "[[topics]] and [storage]"),
    ],
)
def test_topics_and_places_of_the_store_count(other: str, names: str) -> None:
    assert differing(config().shared_digests(), config(other).shared_digests()) == names


def test_the_names_of_locations_count_and_their_order_does_not() -> None:
    both = config(STORE + LOCATION + OTHER + TOPICS).shared_digests()
    assert differing(both, config(STORE + OTHER + LOCATION + TOPICS).shared_digests()) == ""
    renamed = LOCATION.replace('"east"', '"south"')
    assert differing(both, config(STORE + renamed + OTHER + TOPICS).shared_digests()) == "[storage]"


def test_a_proxy_with_other_settings_is_an_alarm_until_it_has_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    live, others = LiveSettings(config()), [config(STORE)]
    troubles: list[str] = []
    is_down = is_rebalancing = False

    async def group_members(*arguments: object) -> list[OwnerMember]:
        if is_down:
            raise BrokerError("no broker answers")
        found = ["" if is_rebalancing else each.shared_digests() for each in (live.config, *others)]
        return [OwnerMember(f"m{n}", "10.0.0.2", frozenset(), True, each) for n, each in enumerate(found)]

    monkeypatch.setattr(member_settings, "group_members", group_members)

    async def main() -> None:
        nonlocal is_down, is_rebalancing
        running = asyncio.create_task(compare_members(cast(Any, None), "topic", live, troubles))
        await asyncio.sleep(INTERVAL_S * 1.5)
        assert troubles == []  # a reload of all proxies takes a while
        await asyncio.sleep(INTERVAL_S)
        said = ["the proxy 10.0.0.2 (m1) has another [[topics]] than this proxy"]
        assert troubles == said
        is_down = True
        await asyncio.sleep(INTERVAL_S)
        assert troubles == said
        is_down, is_rebalancing = False, True
        await asyncio.sleep(INTERVAL_S)
        assert troubles == said
        is_rebalancing = False
        live.change(config(STORE))
        await asyncio.sleep(INTERVAL_S)
        assert troubles == []
        running.cancel()

    loop = VirtualLoop()
    with caplog.at_level(logging.ERROR):
        loop.run_until_complete(main())
    loop.close()
    assert [each.getMessage() for each in caplog.records] == [
        "two proxies of the cluster have different settings:"
        " the proxy 10.0.0.2 (m1) has another [[topics]] than this proxy"
    ]
