"""`TopicTierConfigs`: what a request means for the tier settings of its topics, decided before it is forwarded.

Every topic of a request gets a plan of its own: a change to be recorded once the broker has said yes, or a refusal. The
broker is asked all the same, for it decides who may: a refused topic is forwarded with an entry that no broker accepts,
so that whoever may not alter the topic is told that, and nothing about its settings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.apis.config_entries import (
    APPEND,
    DELETE,
    SET,
    SUBTRACT,
    TOPIC_RESOURCE,
    ConfigRequest,
    ConfigResource,
)
from protocol.errors import ErrorCode
from proxy.broker_configs import BrokerValue
from proxy.handlers.base import FetchSettings, Topology
from proxy.handlers.metadata_topic_guard import REFUSAL
from tiers.errors import RemoteLogError
from tiers.manager.settings import TopicRule
from tiers.manager.topic_tier_config import (
    BROKER_DEFAULTS,
    REMOTE_STORAGE_ENABLE,
    TIER_DEFAULTS,
    InvalidTierConfigError,
    TierValue,
    check_tier_config,
    checked_value,
    is_enabled,
    tier_values,
)
from tiers.model.ids import TopicIdPartition

logger = logging.getLogger(__name__)

_STORE_TIMEOUT_MS = 10_000
_RESOLVE_AGAIN_MS = 100
_OPERATIONS = {APPEND: "APPEND", SUBTRACT: "SUBTRACT"}


class TierConfigMetadata(Protocol):
    """What is needed of `RemoteLogMetadataManager`, in any proxy."""

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None: ...

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]: ...

    async def change_topic_tier_config(self, topic_id: UUID, topic: str, changes: Mapping[str, str | None]) -> None: ...


class TopicConfigs(Protocol):
    """`BrokerConfigs`, or a fake."""

    async def of_topics(self, topics: Sequence[str], timeout_ms: int) -> Mapping[str, Mapping[str, BrokerValue]]: ...

    async def defaults(self, timeout_ms: int) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """`is_final`: whatever the broker says; else only when it finds no fault but ours."""

    code: int
    message: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """`changes` None unsets; empty when nothing is to be recorded. `topic_id` None: of a topic that is yet to be."""

    topic: str
    topic_id: UUID | None
    changes: Mapping[str, str | None]


Plan = Refusal | Change


class TopicTierConfigs:
    def __init__(
        self,
        topology: Topology,
        brokers: TopicConfigs,
        metadata: TierConfigMetadata,
        settings: FetchSettings,
        rules: Sequence[TopicRule],
        metadata_topic: str,
    ) -> None:
        self._topology = topology
        self._brokers = brokers
        self._metadata = metadata
        self._settings = settings
        self._rules = tuple(rules)
        self.metadata_topic = metadata_topic

    def rule(self, topic: str) -> TopicRule | None:
        """The settings file's rule for the topic."""
        if topic.startswith("__"):
            return None
        return next((rule for rule in self._rules if rule.matches(topic)), None)

    async def values(self, topic: str) -> Mapping[str, TierValue] | None:
        """What holds for the topic; None when it cannot be told."""
        topic_id = await self._topic_id(topic)
        if topic_id is None:
            return None
        try:
            await self._ensure_fresh(topic_id)
            return tier_values(self.rule(topic), self._own(topic_id))
        except RemoteLogError:
            return None

    async def plan(self, request: ConfigRequest) -> dict[str, Plan]:
        """By topic; what is missing is forwarded as it came."""
        creates = request.api_key == ApiKey.CREATE_TOPICS
        plans: dict[str, Plan] = {}
        pending: list[_Pending] = []
        for resource in request.resources:
            if resource.resource_type != TOPIC_RESOURCE:
                continue
            if resource.name == self.metadata_topic and not creates:
                plans[resource.name] = Refusal(ErrorCode.TOPIC_AUTHORIZATION_FAILED, REFUSAL, is_final=True)
                continue
            try:
                found = await self._pending(request, resource)
            except InvalidTierConfigError as error:
                plans[resource.name] = Refusal(error.code, str(error))
            except RemoteLogError as error:
                plans[resource.name] = _unknown(error)
            else:
                if found is not None:
                    pending.append(found)
        if pending:
            plans |= await self._checked(request, pending)
        return plans

    async def _pending(self, request: ConfigRequest, resource: ConfigResource) -> _Pending | None:
        changes = _tier_changes(request, resource)
        rule = self.rule(resource.name)
        if request.api_key == ApiKey.CREATE_TOPICS:
            # Nothing is disabled by a topic that is not there yet.
            before = {REMOTE_STORAGE_ENABLE: "false"}
            return _Pending(resource, None, rule, changes, before, _set(changes)) if changes else None
        topic_id = await self._topic_id(resource.name)
        if topic_id is None:
            return _Pending(resource, None, rule, changes, {}, _set(changes)) if changes else None
        own: Mapping[str, str] = {}
        try:
            await self._ensure_fresh(topic_id)
            own = self._own(topic_id)
        except RemoteLogError:
            if changes:
                raise
            return None
        if request.api_key == ApiKey.ALTER_CONFIGS:
            changes = {**dict.fromkeys(own), **changes}
        if not changes and not is_enabled(rule, own):
            return None
        return _Pending(resource, topic_id, rule, changes, own, _set({**own, **changes}))

    async def _checked(self, request: ConfigRequest, pending: list[_Pending]) -> dict[str, Plan]:
        creates = request.api_key == ApiKey.CREATE_TOPICS
        timeout_ms = self._settings.metadata_timeout_ms
        defaults: Mapping[str, str] = BROKER_DEFAULTS
        known: Mapping[str, Mapping[str, BrokerValue]] = {}
        try:
            if creates:
                defaults = await self._brokers.defaults(timeout_ms)
            else:
                known = await self._brokers.of_topics([each.resource.name for each in pending], timeout_ms)
        except RemoteLogError as error:
            return {each.resource.name: _unknown(error) for each in pending}
        plans: dict[str, Plan] = {}
        for each in pending:
            topic = each.resource.name
            values = known.get(topic) or {key: BrokerValue(value, value) for key, value in defaults.items()}
            plans[topic] = Change(topic, each.topic_id, each.changes)
            try:
                each.check(values, replaces=request.api_key == ApiKey.ALTER_CONFIGS)
            except InvalidTierConfigError as error:
                plans[topic] = Refusal(error.code, str(error))
        return plans

    async def record(self, change: Change, topic_id: UUID | None = None) -> None:
        """After the broker has said yes. Raises `RemoteLogError`, `TimeoutError`."""
        if not change.changes:
            return
        async with asyncio.timeout(_STORE_TIMEOUT_MS / 1000):
            topic_id = change.topic_id or topic_id
            while topic_id is None:
                # The broker that answers may not have heard of a new topic yet.
                topic_id = await self._topology.resolve_topic_id(change.topic, 0, self._settings.metadata_timeout_ms)
                if topic_id is None:
                    await asyncio.sleep(_RESOLVE_AGAIN_MS / 1000)
            await self._metadata.change_topic_tier_config(topic_id, change.topic, change.changes)

    async def _topic_id(self, topic: str) -> UUID | None:
        settings = self._settings
        return await self._topology.resolve_topic_id(topic, settings.topic_id_max_age_ms, settings.metadata_timeout_ms)

    async def _ensure_fresh(self, topic_id: UUID) -> None:
        settings = self._settings
        await self._metadata.ensure_fresh(
            TopicIdPartition(topic_id, 0), settings.metadata_max_age_ms, settings.metadata_timeout_ms
        )

    def _own(self, topic_id: UUID) -> Mapping[str, str]:
        return self._metadata.topic_tier_config(topic_id)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A topic whose tier settings change, or that is tiered and changes otherwise."""

    resource: ConfigResource
    topic_id: UUID | None
    rule: TopicRule | None
    changes: Mapping[str, str | None]
    before: Mapping[str, str]
    after: Mapping[str, str]

    def check(self, broker: Mapping[str, BrokerValue], *, replaces: bool) -> None:
        """Raises `InvalidTierConfigError`."""
        if self.resource.name.startswith("__") and self.after.get(REMOTE_STORAGE_ENABLE) == "true":
            raise InvalidTierConfigError("Remote log storage is not supported for internal topics")
        was_tiered = is_enabled(self.rule, self.before) and broker["cleanup.policy"].value == "delete"
        if was_tiered or self.after != self.before:
            check_tier_config(
                self.rule, self.before, self.after, _broker_after(self.resource, broker, replaces=replaces)
            )


def _unknown(error: RemoteLogError) -> Refusal:
    logger.warning("tier settings could not be checked", extra={"error": str(error)})
    return Refusal(ErrorCode.REQUEST_TIMED_OUT, "The topic's tier settings cannot be read now; try again.")


def _set(config: Mapping[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in config.items() if value is not None}


def _tier_changes(request: ConfigRequest, resource: ConfigResource) -> dict[str, str | None]:
    changes: dict[str, str | None] = {}
    for change in resource.changes:
        key = change.name
        if key not in TIER_DEFAULTS:
            continue
        if key in changes:
            raise InvalidTierConfigError("Error due to duplicate config keys", ErrorCode.INVALID_REQUEST)
        if change.operation == DELETE:
            changes[key] = None
            continue
        if change.operation != SET:
            operation = _OPERATIONS.get(change.operation, str(change.operation))
            raise InvalidTierConfigError(f"Can't {operation} to key {key} because its type is not LIST.")
        if change.value is None:
            if request.api_key == ApiKey.CREATE_TOPICS:
                raise InvalidTierConfigError(f"Null value not supported for topic configs: {key}")
            raise InvalidTierConfigError(f"Null value not supported for : {key}", ErrorCode.INVALID_REQUEST)
        changes[key] = checked_value(key, change.value)
    return changes


def _broker_after(resource: ConfigResource, broker: Mapping[str, BrokerValue], *, replaces: bool) -> Mapping[str, str]:
    """What the topic will have if the broker agrees. `replaces`: what the request does not name is unset."""
    after = {key: broker[key].default if replaces else broker[key].value for key in BROKER_DEFAULTS}
    for change in resource.changes:
        if change.name not in after:
            continue
        value = change.value or ""
        items = [item for item in after[change.name].split(",") if item]
        if change.operation == DELETE:
            after[change.name] = broker[change.name].default
        elif change.operation == APPEND:
            after[change.name] = ",".join(dict.fromkeys([*items, *value.split(",")]))
        elif change.operation == SUBTRACT:
            after[change.name] = ",".join(item for item in items if item not in value.split(","))
        else:
            after[change.name] = value
    return after
