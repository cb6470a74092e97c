"""ApiVersions: the APIs of the other files, in the versions that the test sets."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = ApiVersionsRequest


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return response_of(broker)


def response_of(broker: ScriptedBroker, error: int = 0) -> Any:
    keys = [
        ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
        for key, (low, high) in broker.versions.items()
    ]
    return ApiVersionsResponse(error_code=error, api_keys=keys, throttle_time_ms=0)
