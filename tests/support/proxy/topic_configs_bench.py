"""The handlers of topic settings over a fake cluster: what the broker saw of a request, and what the client got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import UUID

from kafka.protocol.admin import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

from protocol.header import build_request_header, build_response_header, parse_request_header, response_body_position
from proxy.cluster.broker_configs import BrokerValue
from proxy.handlers.alter_configs import UNKNOWN_KEY, AlterConfigsHandler
from proxy.handlers.base import FetchSettings
from proxy.handlers.describe_configs import DescribeConfigsHandler
from proxy.handlers.topic_tier_configs import TopicTierConfigs
from proxy.wire.exchange import Forward, Prepare, Spawn
from tests.support.fakes.broker.cluster import FakeCluster
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tiers.config.topic_policy import TopicConfig
from tiers.config.topic_settings import BROKER_DEFAULTS
from tiers.errors import BrokerError

ORDERS, RULED = UUID(int=1), UUID(int=2)
METADATA_TOPIC = "__remote_log_metadata"
ENABLE, LOCAL_MS, OTHER = "remote.storage.enable", "local.retention.ms", "max.message.bytes"
Answers = Mapping[str, int]
"""The broker's error codes by topic."""


class Configs:
    """The brokers' side of a topic's configuration."""

    def __init__(self) -> None:
        self.values = dict(BROKER_DEFAULTS)
        self.is_reachable = True
        self.has_heard = asyncio.Event()
        self.has_heard.set()
        self.has_said_nothing = asyncio.Event()

    async def of_topics(self, topics: Sequence[str], timeout_ms: int) -> Mapping[str, Mapping[str, BrokerValue]]:
        if not self.has_heard.is_set():
            self.has_said_nothing.set()
            return {}
        defaults = await self.defaults(timeout_ms)
        values = {key: BrokerValue(value, BROKER_DEFAULTS[key]) for key, value in defaults.items()}
        return dict.fromkeys(topics, values)

    async def defaults(self, timeout_ms: int) -> Mapping[str, str]:
        if not self.is_reachable:
            raise BrokerError("no broker answers", retriable=True)
        return self.values


class Bench:
    def __init__(self, spawn: Spawn) -> None:
        self.cluster = FakeCluster(topics={"orders": ORDERS, "ruled": RULED})
        self.metadata = InMemoryRemoteLogMetadataManager()
        self.brokers = Configs()
        self.rules = [TopicConfig(pattern="ruled", local_retention_bytes=7)]
        self.settings = FetchSettings(metadata_timeout_ms=50)
        self.configs = TopicTierConfigs(
            self.cluster,
            self.brokers,
            self.metadata.log,
            self.metadata,
            self.settings,
            lambda: self.rules,
            [METADATA_TOPIC],
        )
        self.answer_first: Callable[[bytes], bytes] | None = None
        """Answers what a handler asks first on the client's connection. None: as the broker answers the request."""
        self.asked_first: list[Any] = []
        """The requests that a handler sent on the client's connection before it forwarded the client's own."""
        self.alter = AlterConfigsHandler(self.configs, spawn)
        self.describe = DescribeConfigsHandler(self.configs)

    async def pass_through(self, handler: Any, request: Any, version: int, response_class: Any, answer: Any) -> Any:
        """`answer` makes the broker's response of the request as it came to it. Both are kafka-python's objects."""
        api_key = request.API_KEY

        def ask_first(frame: bytes) -> bytes:
            self.asked_first.append(decoded(frame))
            return build_response_header(api_key, version, 9) + bytes(answer(decoded(frame)).encode(version=version))

        def decoded(frame: bytes) -> Any:
            return type(request).decode(frame[parse_request_header(frame).body_position :], version=version)

        frame = build_request_header(api_key, version, 9, "test") + request.encode(version=version)
        exchange = FakeExchange(self.cluster, frame, answer=self.answer_first or ask_first)
        action, respond = handler.on_request(exchange)
        if isinstance(action, Prepare):
            action = await action.decide()
        assert isinstance(action, Forward)
        seen = decoded(bytes(action.frame))
        payload = build_response_header(api_key, version, 9) + answer(seen).encode(version=version)
        if respond is None:
            return seen, response_class.decode(
                payload[response_body_position(api_key, version, payload) :], version=version
            )
        result = respond(memoryview(payload))
        out = b"".join(await result if asyncio.iscoroutine(result) else result)
        return seen, response_class.decode(out[response_body_position(api_key, version, out) :], version=version)

    def own(self, topic_id: UUID = ORDERS) -> Mapping[str, str]:
        return self.metadata.state.topic_tier_config(topic_id)


def incremental(topics: Mapping[str, Sequence[tuple[str, int, str | None]]], *, validate_only: bool = False) -> Any:
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource
    return IncrementalAlterConfigsRequest(
        resources=[
            resource(
                resource_type=2,
                resource_name=topic,
                configs=[
                    resource.AlterableConfig(name=key, config_operation=operation, value=value)
                    for key, operation, value in changes
                ],
            )
            for topic, changes in topics.items()
        ],
        validate_only=validate_only,
    )


def legacy(topic: str, settings: Mapping[str, str]) -> Any:
    """A request that sets all settings of the topic."""
    resource = AlterConfigsRequest.AlterConfigsResource
    configs = [resource.AlterableConfig(name=name, value=value) for name, value in settings.items()]
    return AlterConfigsRequest(
        resources=[resource(resource_type=2, resource_name=topic, configs=configs)], validate_only=False
    )


def altered(response_class: Any, codes: Answers) -> Any:
    """Answers every resource. A resource with an unknown key gets INVALID_CONFIG, as from a broker."""

    def answer(seen: Any) -> Any:
        one = response_class.AlterConfigsResourceResponse
        responses = []
        for resource in seen.resources:
            poisoned = any(config.name == UNKNOWN_KEY for config in resource.configs)
            code = codes.get(resource.resource_name, 40 if poisoned else 0)
            responses.append(
                one(error_code=code, error_message=None, resource_type=2, resource_name=resource.resource_name)
            )
        return response_class(throttle_time_ms=0, responses=responses)

    return answer


def sent(seen: Any) -> dict[str, list[str]]:
    return {one.resource_name: [config.name for config in one.configs] for one in seen.resources}


def codes_of(response: Any) -> dict[str, int]:
    return {one.resource_name: one.error_code for one in response.responses}


async def alter(bench: Bench, request: Any, version: int = 1, codes: Answers | None = None) -> tuple[Any, Any]:
    response = AlterConfigsResponse if isinstance(request, AlterConfigsRequest) else IncrementalAlterConfigsResponse
    seen, answer = await bench.pass_through(bench.alter, request, version, response, altered(response, codes or {}))
    return seen, answer
