"""`TopicTierConfigs`: what a request means for the tier settings of its topics, decided before it is forwarded.

Every topic of a request gets a plan of its own: a change to be recorded once the broker has said yes, or a refusal. The
broker is asked all the same, for it decides who may: a refused topic is forwarded with an entry that no broker accepts,
so that whoever may not alter the topic is told that, and nothing about its settings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar
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
from tiers.errors import BrokerError, RemoteLogError
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
_LOOK_UP_TIMEOUT_MS = 5_000
"""For each of the three before a change, and of the two before settings are shown: those that cannot be told are shown
as the broker has them, as if there were no tier. Who looks at settings or changes them waits longer than a consumer;
all of this together still ends within the 30 s that the stock tools wait."""
_RESOLVE_AGAIN_MS = 100
_HEARD_WITHIN_MS = 1_000
"""How long a topic may be there before the broker that is asked has heard of it."""
Found = TypeVar("Found")
_OPERATIONS = {APPEND: "APPEND", SUBTRACT: "SUBTRACT"}


class TierConfigMetadata(Protocol):
    """What is needed of `RemoteLogMetadataManager`, in any proxy."""

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None: ...

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]: ...

    async def change_topic_tier_config(
        self, topic_id: UUID, topic: str, changes: Mapping[str, str | None], check: Callable[[Mapping[str, str]], None]
    ) -> None: ...


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
    """`changes` None unsets; empty when nothing is to be recorded. `topic_id` None: of a topic that is yet to be.

    `check` raises `InvalidTierConfigError` if the topic must not be changed so, given what it has by then."""

    topic: str
    topic_id: UUID | None
    changes: Mapping[str, str | None]
    check: Callable[[Mapping[str, str]], None]


Plan = Refusal | Change


class TopicTierConfigs:
    def __init__(
        self,
        topology: Topology,
        brokers: TopicConfigs,
        metadata: TierConfigMetadata,
        settings: FetchSettings,
        rules: Sequence[TopicRule],
        own_topics: Collection[str],
    ) -> None:
        """`own_topics` are the remote log's, not for clients to change."""
        self._topology = topology
        self._brokers = brokers
        self._metadata = metadata
        self._settings = settings
        self._rules = tuple(rules)
        self._own_topics = own_topics

    def rule(self, topic: str) -> TopicRule | None:
        """The settings file's rule for the topic."""
        if topic.startswith("__"):
            return None
        return next((rule for rule in self._rules if rule.matches(topic)), None)

    async def values(self, topics: Collection[str], node_id: int | None) -> dict[str, Mapping[str, TierValue]]:
        """What holds for each of the topics; what cannot be told is missing. `node_id`: the broker that named them."""
        timeout_ms = _LOOK_UP_TIMEOUT_MS
        try:
            topic_ids = await self._topic_ids(topics, node_id, timeout_ms)
        except RemoteLogError:
            return {}
        found: dict[str, Mapping[str, TierValue]] = {}
        for topic, topic_id in topic_ids.items():
            try:
                await self._ensure_fresh(topic_id, self._settings.metadata_max_age_ms, timeout_ms)
                found[topic] = tier_values(self.rule(topic), self._own(topic_id))
            except RemoteLogError:
                continue
        return found

    async def plan(self, request: ConfigRequest) -> dict[str, Plan]:
        """By topic; what is missing is forwarded as it came."""
        plans: dict[str, Plan] = {}
        resources: list[ConfigResource] = []
        for resource in request.resources:
            if resource.resource_type != TOPIC_RESOURCE:
                continue
            if resource.name in self._own_topics:
                plans[resource.name] = Refusal(ErrorCode.TOPIC_AUTHORIZATION_FAILED, REFUSAL, is_final=True)
            else:
                resources.append(resource)
        topic_ids: Mapping[str, UUID] = {}
        if request.api_key != ApiKey.CREATE_TOPICS and resources:
            try:
                topic_ids = await _heard_of(
                    [resource.name for resource in resources],
                    lambda names: self._topic_ids(names, None, _LOOK_UP_TIMEOUT_MS),
                )
            except RemoteLogError as error:
                return plans | {resource.name: _unknown(error) for resource in resources}
        answers = await asyncio.gather(
            *(self._pending(request, resource, topic_ids.get(resource.name)) for resource in resources)
        )
        pending = [found for found in answers if isinstance(found, _Pending)]
        plans |= {
            resource.name: found
            for resource, found in zip(resources, answers, strict=True)
            if isinstance(found, Refusal)
        }
        if pending:
            plans |= await self._checked(request, pending)
        return plans

    async def _pending(
        self, request: ConfigRequest, resource: ConfigResource, topic_id: UUID | None
    ) -> _Pending | Refusal | None:
        try:
            changes = _tier_changes(request, resource)
        except InvalidTierConfigError as error:
            return Refusal(error.code, str(error))
        rule = self.rule(resource.name)
        replaces = request.api_key == ApiKey.ALTER_CONFIGS
        if topic_id is None:
            if changes and replaces:
                changes = {**dict.fromkeys(TIER_DEFAULTS), **changes}
            return _Pending(resource, None, rule, changes, {}, replaces) if changes else None
        try:
            await self._ensure_fresh(topic_id, 0, _LOOK_UP_TIMEOUT_MS)
            own = self._own(topic_id)
        except RemoteLogError as error:
            return _unknown(error) if changes else None
        if not changes and not is_enabled(rule, own) and not (own and replaces):
            return None
        if replaces:
            changes = {**dict.fromkeys(TIER_DEFAULTS), **changes}
        return _Pending(resource, topic_id, rule, changes, own, replaces)

    async def _checked(self, request: ConfigRequest, pending: Sequence[_Pending]) -> dict[str, Plan]:
        timeout_ms = _LOOK_UP_TIMEOUT_MS
        defaults: Mapping[str, str] = BROKER_DEFAULTS
        known: Mapping[str, Mapping[str, BrokerValue]] = {}
        try:
            if request.api_key == ApiKey.CREATE_TOPICS:
                defaults = await self._brokers.defaults(timeout_ms)
            else:
                known = await _heard_of(
                    [each.resource.name for each in pending if each.topic_id is not None],
                    lambda names: self._brokers.of_topics(names, timeout_ms),
                )
        except RemoteLogError as error:
            return {each.resource.name: _unknown(error) for each in pending}
        plans: dict[str, Plan] = {}
        for each in pending:
            topic = each.resource.name
            if each.topic_id is not None and topic not in known:
                plans[topic] = _unknown(BrokerError(f"no broker tells of {topic}", retriable=True))
                continue
            values = known.get(topic) or {key: BrokerValue(value, value) for key, value in defaults.items()}
            check = each.check_over(values, creates=request.api_key == ApiKey.CREATE_TOPICS)
            try:
                check(each.own)
            except InvalidTierConfigError as error:
                plans[topic] = Refusal(error.code, str(error))
            else:
                plans[topic] = Change(topic, each.topic_id, each.changes, check)
        return plans

    async def record(self, change: Change, topic_id: UUID | None = None) -> None:
        """After the broker has said yes. Raises `RemoteLogError`, `TimeoutError`.

        `InvalidTierConfigError`: another change came between, and both do not go together."""
        if not change.changes:
            return
        async with asyncio.timeout(_STORE_TIMEOUT_MS / 1000):
            topic_id = change.topic_id or topic_id
            while topic_id is None:
                # The broker that answers may not have heard of a new topic yet.
                topic_id = await self._topology.resolve_topic_id(change.topic, 0, self._settings.metadata_timeout_ms)
                if topic_id is None:
                    await asyncio.sleep(_RESOLVE_AGAIN_MS / 1000)
            await self._metadata.change_topic_tier_config(topic_id, change.topic, change.changes, change.check)

    async def _topic_ids(self, topics: Collection[str], node_id: int | None, timeout_ms: int) -> Mapping[str, UUID]:
        return await self._topology.current_topic_ids(topics, node_id, timeout_ms)

    async def _ensure_fresh(self, topic_id: UUID, max_age_ms: int, timeout_ms: int) -> None:
        await self._metadata.ensure_fresh(TopicIdPartition(topic_id, 0), max_age_ms, timeout_ms)

    def _own(self, topic_id: UUID) -> Mapping[str, str]:
        return self._metadata.topic_tier_config(topic_id)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A topic whose tier settings change, or that is tiered and changes otherwise. `own` is what it has now."""

    resource: ConfigResource
    topic_id: UUID | None
    rule: TopicRule | None
    changes: Mapping[str, str | None]
    own: Mapping[str, str]
    replaces: bool
    """What the request does not name is unset."""

    def check_over(self, broker: Mapping[str, BrokerValue], *, creates: bool) -> Callable[[Mapping[str, str]], None]:
        """`creates`: nothing is disabled by a topic that is not there yet."""

        def check(own: Mapping[str, str]) -> None:
            before = {REMOTE_STORAGE_ENABLE: "false", **own} if creates else own
            after = {key: value for key, value in {**own, **self.changes}.items() if value is not None}
            if self.resource.name.startswith("__") and after.get(REMOTE_STORAGE_ENABLE) == "true":
                raise InvalidTierConfigError("Remote log storage is not supported for internal topics")
            was_tiered = is_enabled(self.rule, before) and broker["cleanup.policy"].value == "delete"
            if was_tiered or after != own:
                broker_after = _broker_after(self.resource, broker, replaces=self.replaces)
                check_tier_config(self.rule, before, after, broker_after)

        return check


async def _heard_of(
    topics: Sequence[str], ask: Callable[[Sequence[str]], Awaitable[Mapping[str, Found]]]
) -> Mapping[str, Found]:
    """What brokers say of the topics. Who has not heard of one is asked again for a moment: the topic may be new, and
    nothing is to be decided as if it had no settings."""
    found: dict[str, Found] = {}
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + _HEARD_WITHIN_MS / 1000
    missing = list(dict.fromkeys(topics))
    while missing:
        found |= await ask(missing)
        missing = [topic for topic in missing if topic not in found]
        if not missing or loop.time() >= deadline_s:
            break
        await asyncio.sleep(_RESOLVE_AGAIN_MS / 1000)
    return found


def _unknown(error: RemoteLogError) -> Refusal:
    logger.warning("tier settings could not be checked", extra={"error": str(error)})
    return Refusal(ErrorCode.REQUEST_TIMED_OUT, "The topic's tier settings cannot be read now; try again.")


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
