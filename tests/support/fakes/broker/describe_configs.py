"""DescribeConfigs: no topic has any settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import DescribeConfigsRequest, DescribeConfigsResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = DescribeConfigsRequest


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return DescribeConfigsResponse(throttle_time_ms=0, results=[])
