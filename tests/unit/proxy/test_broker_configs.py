"""A topic's configuration at the brokers, as the rule of tiered topics needs it."""

from __future__ import annotations

from typing import Any

import pytest
from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from proxy.cluster.broker_configs import BrokerConfigs
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tiers.broker.client import BrokerClient
from tiers.config.topic_policy import BROKER_KEYS
from tiers.errors import BrokerError

_Result = DescribeConfigsResponse.DescribeConfigsResult


async def policy_of(*results: Any) -> Any:
    async def answer(request: Any) -> Any:
        return DescribeConfigsResponse(throttle_time_ms=0, results=list(results))

    async with ScriptedBroker() as broker:
        broker.answers[ApiKey.DESCRIBE_CONFIGS] = answer
        client = BrokerClient(broker.addresses, client_id="tidegate", request_timeout_ms=60_000)
        try:
            return await BrokerConfigs(client).of_policy("orders", 60_000)
        finally:
            await client.close()
            (asked,) = broker.received(DescribeConfigsRequest)
            assert [set(one.configuration_keys) for one in asked.resources] == [set(BROKER_KEYS)]


def result(error_code: int = 0, **values: str | None) -> Any:
    config = _Result.DescribeConfigsResourceResult
    return _Result(
        error_code=error_code,
        error_message=None,
        resource_type=2,
        resource_name="orders",
        configs=[
            config(
                name=name.replace("_", "."),
                value=value,
                read_only=False,
                config_source=5,
                is_sensitive=False,
                synonyms=[],
                config_type=0,
                documentation=None,
            )
            for name, value in values.items()
        ],
    )


async def test_the_values_are_those_that_hold() -> None:
    told = result(cleanup_policy="delete", retention_ms="5", retention_bytes=None)
    assert await policy_of(told) == {"cleanup.policy": "delete", "retention.ms": "5"}


@pytest.mark.parametrize("code", [ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED])
async def test_a_topic_without_describe_has_no_configuration(code: int) -> None:
    assert await policy_of(result(code)) is None


@pytest.mark.parametrize("results", [[], [result(ErrorCode.REQUEST_TIMED_OUT)]])
async def test_without_an_answer_the_configuration_is_unknown(results: list[Any]) -> None:
    with pytest.raises(BrokerError):
        await policy_of(*results)
