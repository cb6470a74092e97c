"""A topic's total retention through the proxy: the users who may shorten it, and those who see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import (
    DescribeConfigsRequest,
    DescribeConfigsResponse,
)

from proxy.handlers.alter_configs import UNKNOWN_KEY
from tests.support.proxy.topic_configs_bench import (
    ENABLE,
    ORDERS,
    OTHER,
    Bench,
    alter,
    codes_of,
    incremental,
    legacy,
    sent,
)
from tiers.config.topic_policy import TierWork
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES

SET, DELETE = 0, 1
NINETY_DAYS = "129600"


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as group:
        made = Bench(group.create_task)
        await made.metadata.change_topic_tier_config(ORDERS, "orders", {ENABLE: "true", RETENTION_MINUTES: NINETY_DAYS})
        yield made


async def shown(bench: Bench, topic: str, keys: list[str] | None) -> dict[str, tuple[str, int]]:
    asked = DescribeConfigsRequest.DescribeConfigsResource
    request = DescribeConfigsRequest(
        resources=[asked(resource_type=2, resource_name=topic, configuration_keys=keys)],
        include_synonyms=False,
        include_documentation=False,
    )

    def answer(seen: Any) -> Any:
        result = DescribeConfigsResponse.DescribeConfigsResult
        one = result(error_code=0, error_message=None, resource_type=2, resource_name=topic, configs=[])
        return DescribeConfigsResponse(throttle_time_ms=0, results=[one])

    _, response = await bench.pass_through(bench.describe, request, 4, DescribeConfigsResponse, answer)
    return {entry.name: (entry.value, entry.config_source) for entry in response.results[0].configs}


@pytest.mark.parametrize("minutes", ["1", "-1", "0"])
async def test_a_request_that_names_the_number_changes_the_total(bench: Bench, minutes: str) -> None:
    seen, response = await alter(bench, incremental({"orders": [(RETENTION_MINUTES, SET, minutes), (OTHER, SET, "5")]}))
    assert (sent(seen), codes_of(response)) == ({"orders": [OTHER]}, {"orders": 0})
    assert bench.own()[RETENTION_MINUTES] == minutes


@pytest.mark.parametrize("change", [(RETENTION_MINUTES, DELETE, None), (RETENTION_MINUTES, SET, "-2")])
async def test_a_removal_that_would_shorten_is_refused(bench: Bench, change: tuple[str, int, str | None]) -> None:
    seen, response = await alter(bench, incremental({"orders": [change]}))
    assert (sent(seen), codes_of(response)) == ({"orders": [UNKNOWN_KEY]}, {"orders": 40})
    assert "It is invalid to remove" in response.responses[0].error_message
    assert bench.own()[RETENTION_MINUTES] == NINETY_DAYS


@pytest.mark.parametrize("change", [(RETENTION_MINUTES, DELETE, None), (RETENTION_MINUTES, SET, "-2")])
async def test_a_total_may_be_removed_with_a_longer_retention(
    bench: Bench, change: tuple[str, int, str | None]
) -> None:
    longer = [("retention.ms", SET, "-1"), change]
    assert codes_of((await alter(bench, incremental({"orders": longer})))[1]) == {"orders": 0}
    assert bench.own() == {ENABLE: "true"}


@pytest.mark.parametrize("version", [0, 1, 2])
async def test_a_legacy_request_keeps_totals_and_pauses_that_it_does_not_name(bench: Bench, version: int) -> None:
    await bench.metadata.change_topic_tier_config(ORDERS, "orders", {TierWork.TRIMMING.key: "true"})
    _, response = await alter(bench, legacy("orders", {ENABLE: "true", OTHER: "1"}), version)
    assert codes_of(response) == {"orders": 0}
    assert bench.own() == {ENABLE: "true", RETENTION_MINUTES: NINETY_DAYS, TierWork.TRIMMING.key: "true"}


async def test_a_pause_is_shown_when_it_is_set(bench: Bench) -> None:
    assert TierWork.COPYING.key not in await shown(bench, "orders", None)
    _, response = await alter(bench, incremental({"orders": [(TierWork.COPYING.key, SET, "true")]}))
    assert codes_of(response) == {"orders": 0}
    assert (await shown(bench, "orders", None))[TierWork.COPYING.key] == ("true", 1)
    assert await shown(bench, "orders", [TierWork.READING.key]) == {TierWork.READING.key: ("false", 5)}


@pytest.mark.parametrize(
    ("key", "replacement"),
    [("remote.log.retention.ms", RETENTION_MINUTES), ("remote.log.retention.hours", RETENTION_MINUTES)],
)
async def test_a_key_that_does_not_exist_names_its_replacement(bench: Bench, key: str, replacement: str) -> None:
    _, response = await alter(bench, incremental({"orders": [(key, SET, "5")]}))
    assert codes_of(response) == {"orders": 40}
    assert response.responses[0].error_message == f"Unknown topic config name: {key}. Use {replacement} instead."


async def test_the_total_is_shown_like_the_other_settings(bench: Bench) -> None:
    found = await shown(bench, "orders", None)
    assert (found[RETENTION_MINUTES], found[RETENTION_BYTES]) == ((NINETY_DAYS, 1), ("-2", 5))
    assert (await shown(bench, "ruled", None))[RETENTION_MINUTES] == ("-2", 5)
    assert await shown(bench, "orders", [RETENTION_BYTES]) == {RETENTION_BYTES: ("-2", 5)}


async def test_a_topic_that_is_not_tiered_shows_only_a_total_that_it_has(bench: Bench) -> None:
    bench.cluster.topics["plain"] = plain = UUID(int=5)
    assert ENABLE in await shown(bench, "plain", None)
    assert RETENTION_MINUTES not in await shown(bench, "plain", None)
    await bench.metadata.change_topic_tier_config(plain, "plain", {RETENTION_MINUTES: "7"})
    found = await shown(bench, "plain", None)
    assert found[RETENTION_MINUTES] == ("7", 1)
    assert RETENTION_BYTES not in found
