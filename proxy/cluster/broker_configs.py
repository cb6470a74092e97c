"""`BrokerConfigs`: reads the topic configuration keys that the tier's rules depend on from the brokers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from kafka.protocol.admin import DescribeConfigsRequest

from protocol.errors import ErrorCode
from tiers.broker.client import BrokerClient
from tiers.config.topic_policy import BROKER_KEYS
from tiers.config.topic_settings import BROKER_DEFAULTS
from tiers.errors import BrokerError

_TOPIC_RESOURCE, _BROKER_RESOURCE = 2, 4
_TOPIC_SOURCE = 1
_MS_PER_UNIT = {"log.retention.ms": 1, "log.retention.minutes": 60_000, "log.retention.hours": 3_600_000}


class BrokerValue(NamedTuple):
    value: str
    default: str
    """The value that would apply if the topic did not set the key."""


class BrokerConfigs:
    def __init__(self, client: BrokerClient) -> None:
        self._client = client

    async def of_topics(self, topics: Collection[str], timeout_ms: int) -> Mapping[str, Mapping[str, BrokerValue]]:
        """Returns the keys of `BROKER_DEFAULTS` and of `BROKER_KEYS` for each topic that the brokers know.

        Raises `BrokerError`."""
        keys = list(dict.fromkeys((*BROKER_DEFAULTS, *BROKER_KEYS)))
        return {
            result.resource_name: {entry.name: _value_of(entry) for entry in result.configs}
            for result in await self._describe(dict.fromkeys(topics, keys), _TOPIC_RESOURCE, None, timeout_ms)
            if result.error_code == ErrorCode.NONE
        }

    async def of_policy(self, topic: str, timeout_ms: int) -> Mapping[str, str] | None:
        """Returns the topic's values of `BROKER_KEYS`; None: the topic is not there, or the proxy may not ask for them.

        Raises `BrokerError`."""
        results = await self._describe({topic: list(BROKER_KEYS)}, _TOPIC_RESOURCE, None, timeout_ms)
        result = next((each for each in results if each.resource_name == topic), None)
        if result is None:
            raise BrokerError(f"the configuration of {topic} is not told", retriable=True)
        if result.error_code in (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.TOPIC_AUTHORIZATION_FAILED):
            return None
        if result.error_code != ErrorCode.NONE:
            raise BrokerError(f"the configuration of {topic} is not told", result.error_code, retriable=True)
        return {entry.name: entry.value for entry in result.configs if entry.value is not None}

    async def defaults(self, timeout_ms: int) -> Mapping[str, str]:
        """Returns the values that a new topic gets. If a broker does not report a key, Kafka's own default applies.

        Raises `BrokerError`."""
        keys = [*_MS_PER_UNIT, "log.retention.bytes", "log.cleanup.policy"]

        async def described(node_id: int, left_ms: int) -> list[Any]:
            return await self._describe({str(node_id): keys}, _BROKER_RESOURCE, node_id, left_ms)

        found: dict[str, str] = {}
        for result in await self._client.of_any_broker(described, timeout_ms):
            found = {entry.name: entry.value for entry in result.configs if entry.value is not None}
        defaults = dict(BROKER_DEFAULTS)
        for key, unit_ms in _MS_PER_UNIT.items():
            if key in found:
                value = int(found[key])
                defaults["retention.ms"] = str(value * unit_ms if value >= 0 else -1)
                break
        for key in ("retention.bytes", "cleanup.policy"):
            defaults[key] = found.get(f"log.{key}", defaults[key])
        return defaults

    async def _describe(
        self, keys: Mapping[str, list[str]], resource_type: int, node_id: int | None, timeout_ms: int
    ) -> list[Any]:
        if not keys:
            return []
        request = DescribeConfigsRequest
        resources = [
            request.DescribeConfigsResource(resource_type=resource_type, resource_name=name, configuration_keys=wanted)
            for name, wanted in keys.items()
        ]
        message = request(resources=resources, include_synonyms=True, include_documentation=False)
        response: Any = await self._client.request(node_id, message, timeout_ms, min_version=1)
        return list(response.results)


def _value_of(entry: Any) -> BrokerValue:
    below = next((synonym.value for synonym in entry.synonyms if synonym.source != _TOPIC_SOURCE), None)
    value = entry.value or ""
    if entry.config_source != _TOPIC_SOURCE:
        return BrokerValue(value, value)
    return BrokerValue(value, BROKER_DEFAULTS.get(entry.name, "") if below is None else below)
