"""`TopicTierConfigs`: decides what a request means for the tier settings of its topics, before it is forwarded.

Every topic of a request gets a plan: a change to record after the broker has accepted the request, or a refusal. The
broker is asked about a refused topic too, because the broker decides who is authorized. The proxy forwards a refused
topic with an entry that no broker accepts. So a client that may not alter the topic gets the authorization error, and
learns nothing about the topic's settings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
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
from proxy.cluster.broker_configs import BrokerValue
from proxy.handlers.base import ClusterTopology, FetchSettings
from proxy.handlers.guards import REFUSAL
from proxy.handlers.turns import in_slices, slices_of
from tiers.config.topic_policy import PAUSE_KEYS, Rules, TopicConfig, is_internal
from tiers.config.topic_settings import (
    BROKER_DEFAULTS,
    REMOTE_STORAGE_ENABLE,
    TIER_DEFAULTS,
    InvalidTierConfigError,
    TierValue,
    check_name,
    check_tier_config,
    checked_value,
    is_enabled,
    removes,
    tier_values,
)
from tiers.config.total_retention import TOTAL_KEYS
from tiers.errors import BrokerError, RemoteLogError
from tiers.metadata.changes import CheckTierConfig, MetadataChanges
from tiers.metadata.metadata_log import FreshMetadata
from tiers.model.ids import TopicIdPartition

logger = logging.getLogger(__name__)

_STORE_TIMEOUT_MS = 10_000
_LOOK_UP_TIMEOUT_MS = 5_000
"""The timeout of each look-up: there are three before a change, and two before settings are shown.

If a look-up fails, the settings are shown as the broker has them, as if there were no remote tier. An administrator
waits longer than a consumer. But all look-ups together end within the 30 s that Kafka's own tools wait."""
_RESOLVE_AGAIN_MS = 100
_HEARD_WITHIN_MS = 1_000
"""How long a broker may not know a topic that was just created."""
Found = TypeVar("Found")
_REPLACED = {key: None for key in TIER_DEFAULTS if key not in (*TOTAL_KEYS, *PAUSE_KEYS)}
"""The keys that AlterConfigs unsets if it does not name them. The total retention and the pauses stay: a client that
does not know them must not expire or trim records by leaving them out."""
_OPERATIONS = {APPEND: "APPEND", SUBTRACT: "SUBTRACT"}


class TopicConfigs(Protocol):
    """The interface of `BrokerConfigs`."""

    async def of_topics(self, topics: Sequence[str], timeout_ms: int) -> Mapping[str, Mapping[str, BrokerValue]]: ...

    async def defaults(self, timeout_ms: int) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Refusal:
    """The refusal of a topic's changes. `is_final`: it replaces the broker's answer, whatever that is.

    Otherwise it applies only if the broker rejects nothing but the entry that the proxy added."""

    code: int
    message: str | None
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class Change:
    """The tier settings to change. A value of None unsets a key. `changes` is empty if there is nothing to record.

    `topic_id` is None if the topic does not exist yet. `former_ids` are the ids that brokers knew under its name before
    that: a broker that lags behind may name one of them after the creation. `check` takes the topic's own tier settings
    when the change is recorded, and raises `InvalidTierConfigError` if they do not allow it."""

    topic: str
    topic_id: UUID | None
    changes: Mapping[str, str | None]
    check: CheckTierConfig
    former_ids: Collection[UUID] = ()


Plan = Refusal | Change


class TopicTierConfigs:
    def __init__(
        self,
        topology: ClusterTopology,
        brokers: TopicConfigs,
        metadata: FreshMetadata,
        changes: MetadataChanges,
        settings: FetchSettings,
        rules: Rules,
        own_topics: Collection[str],
    ) -> None:
        """`own_topics` are the remote log's own topics, which clients must not change."""
        self._topology = topology
        self._brokers = brokers
        self._metadata = metadata
        self._changes = changes
        self._settings = settings
        self._rules = rules
        self._own_topics = own_topics

    def rule(self, topic: str) -> TopicConfig | None:
        """Returns the first rule of the settings file that matches the topic."""
        if is_internal(topic):
            return None
        return next((rule for rule in self._rules() if rule.matches(topic)), None)

    async def values(self, topics: Collection[str], node_id: int | None) -> dict[str, Mapping[str, TierValue]]:
        """Returns the tier settings of each topic. A topic whose settings cannot be read is missing.

        `node_id` is the broker to ask for the topic ids, because it named the topics."""
        timeout_ms = _LOOK_UP_TIMEOUT_MS
        try:
            topic_ids = await self._topic_ids(topics, node_id, timeout_ms)
        except RemoteLogError:
            return {}
        found: dict[str, Mapping[str, TierValue]] = {}

        async def look_up(known: tuple[str, UUID]) -> None:
            topic, topic_id = known
            with suppress(RemoteLogError):
                await self._ensure_fresh(topic_id, self._settings.metadata_max_age_ms, timeout_ms)
                found[topic] = tier_values(self.rule(topic), self._own(topic_id))

        await in_slices(list(topic_ids.items()), look_up, timeout_ms)
        return found

    async def plan(self, request: ConfigRequest, denied: Mapping[str, Refusal]) -> dict[str, Plan]:
        """Returns the plans by topic. A topic without a plan is forwarded unchanged.

        `denied` are the topics that the broker does not let the client change. Nothing is looked up for them."""
        plans: dict[str, Plan] = {}
        resources: list[ConfigResource] = []
        async for part in slices_of(request.resources):
            for resource in part:
                if resource.resource_type != TOPIC_RESOURCE:
                    continue
                if resource.name in self._own_topics:
                    plans[resource.name] = Refusal(*REFUSAL, is_final=True)
                elif resource.name in denied:
                    plans[resource.name] = denied[resource.name]
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
        answers = await in_slices(
            resources, lambda resource: self._pending(request, resource, topic_ids.get(resource.name))
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
                changes = {**_REPLACED, **changes}
            return _Pending(resource, None, rule, changes, {}, replaces) if changes else None
        try:
            await self._ensure_fresh(topic_id, 0, _LOOK_UP_TIMEOUT_MS)
            own = self._own(topic_id)
        except RemoteLogError as error:
            return _unknown(error) if changes else None
        if not changes and not is_enabled(rule, own) and not (own and replaces):
            return None
        if replaces:
            changes = {**_REPLACED, **changes}
        return _Pending(resource, topic_id, rule, _said_in_full(rule, own, changes), own, replaces)

    async def _checked(self, request: ConfigRequest, pending: Sequence[_Pending]) -> dict[str, Plan]:
        timeout_ms = _LOOK_UP_TIMEOUT_MS
        defaults: Mapping[str, str] = BROKER_DEFAULTS
        known: Mapping[str, Mapping[str, BrokerValue]] = {}
        former: Mapping[str, Collection[UUID]] = {}
        try:
            if request.api_key == ApiKey.CREATE_TOPICS:
                defaults = await self._brokers.defaults(timeout_ms)
                former = await self._topology.all_topic_ids([each.resource.name for each in pending], timeout_ms)
            else:
                known = await _heard_of(
                    [each.resource.name for each in pending if each.topic_id is not None],
                    lambda names: self._brokers.of_topics(names, timeout_ms),
                )
        except RemoteLogError as error:
            return {each.resource.name: _unknown(error) for each in pending}
        plans: dict[str, Plan] = {}
        async for part in slices_of(pending):
            for each in part:
                topic = each.resource.name
                if each.topic_id is not None and topic not in known:
                    plans[topic] = _unknown(BrokerError(f"no broker tells of {topic}", retriable=True))
                    continue
                values = known.get(topic) or {key: BrokerValue(value, value) for key, value in defaults.items()}
                creates = request.api_key == ApiKey.CREATE_TOPICS
                check = _Check(each.resource, each.rule, each.changes, values, each.replaces, creates)
                try:
                    check(each.own)
                except InvalidTierConfigError as error:
                    plans[topic] = Refusal(error.code, str(error))
                else:
                    plans[topic] = Change(topic, each.topic_id, each.changes, check, former.get(topic, ()))
        return plans

    async def record(self, change: Change, topic_id: UUID | None = None) -> None:
        """Records a change, after the broker has accepted the request. Raises `RemoteLogError` and `TimeoutError`.

        Raises `InvalidTierConfigError` if another change came first, and the two contradict each other."""
        if not change.changes:
            return
        async with asyncio.timeout(_STORE_TIMEOUT_MS / 1000):
            topic_id = change.topic_id or topic_id
            while topic_id is None:
                # The broker that answers may not know the new topic yet, or not that its predecessor was deleted.
                topic_id = await self._topology.resolve_topic_id(change.topic, 0, self._settings.metadata_timeout_ms)
                if topic_id in change.former_ids:
                    topic_id = None
                if topic_id is None:
                    await asyncio.sleep(_RESOLVE_AGAIN_MS / 1000)
            await self._changes.change_topic_tier_config(topic_id, change.topic, change.changes, change.check)

    async def _topic_ids(self, topics: Collection[str], node_id: int | None, timeout_ms: int) -> Mapping[str, UUID]:
        return await self._topology.current_topic_ids(topics, node_id, timeout_ms)

    async def _ensure_fresh(self, topic_id: UUID, max_age_ms: int, timeout_ms: int) -> None:
        await self._metadata.ensure_fresh(TopicIdPartition(topic_id, 0), max_age_ms, timeout_ms)

    def _own(self, topic_id: UUID) -> Mapping[str, str]:
        return self._metadata.state.topic_tier_config(topic_id)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A topic whose tier settings change, or a tiered topic whose other settings change.

    `own` are its current tier settings."""

    resource: ConfigResource
    topic_id: UUID | None
    rule: TopicConfig | None
    changes: Mapping[str, str | None]
    own: Mapping[str, str]
    replaces: bool
    """Whether the request unsets every key that it does not name, the total retention excepted."""


@dataclass(frozen=True, slots=True)
class _Check:
    """The check of a change against the broker's settings.

    `creates`: the topic does not exist yet, so the change cannot disable its remote storage."""

    resource: ConfigResource
    rule: TopicConfig | None
    changes: Mapping[str, str | None]
    broker: Mapping[str, BrokerValue]
    replaces: bool
    creates: bool

    def __call__(self, own: Mapping[str, str]) -> None:
        before = {REMOTE_STORAGE_ENABLE: "false", **own} if self.creates else own
        after = {key: value for key, value in {**own, **self.changes}.items() if value is not None}
        if is_internal(self.resource.name) and after.get(REMOTE_STORAGE_ENABLE) == "true":
            raise InvalidTierConfigError("Remote log storage is not supported for internal topics")
        was_tiered = is_enabled(self.rule, before) and self.broker["cleanup.policy"].value == "delete"
        if was_tiered or after != own:
            broker_after = _broker_after(self.resource, self.broker, replaces=self.replaces)
            check_tier_config(self.rule, before, after, broker_after)


async def _heard_of(
    topics: Sequence[str], ask: Callable[[Sequence[str]], Awaitable[Mapping[str, Found]]]
) -> Mapping[str, Found]:
    """Returns the brokers' answers by topic. Asks again, for up to a second, about topics that a broker does not know.

    Such a topic may be new, and the proxy must not decide as if it had no settings."""
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


def _said_in_full(
    rule: TopicConfig | None, own: Mapping[str, str], changes: Mapping[str, str | None]
) -> Mapping[str, str | None]:
    """Returns the changes with `remote.storage.enable=false` if they disable the topic by unsetting that key.

    The remote log of a disabled topic is deleted only if the key is recorded: a topic that no settings file tiers any
    more looks the same without it."""
    after = {key: value for key, value in {**own, **changes}.items() if value is not None}
    is_disabled = is_enabled(rule, own) and not is_enabled(rule, after)
    return {**changes, REMOTE_STORAGE_ENABLE: "false"} if is_disabled else changes


def _unknown(error: RemoteLogError) -> Refusal:
    logger.warning("tier settings could not be checked", extra={"error": str(error)})
    return Refusal(ErrorCode.REQUEST_TIMED_OUT, "The topic's tier settings cannot be read now; try again.")


def _tier_changes(request: ConfigRequest, resource: ConfigResource) -> dict[str, str | None]:
    changes: dict[str, str | None] = {}
    for change in resource.changes:
        key = change.name
        if change.operation != DELETE:
            check_name(key)
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
        value = checked_value(key, change.value)
        changes[key] = None if removes(key, value) else value
    return changes


def _broker_after(resource: ConfigResource, broker: Mapping[str, BrokerValue], *, replaces: bool) -> Mapping[str, str]:
    """Returns the broker's settings of the topic if the broker accepts the request.

    `replaces`: the request unsets every key that it does not name."""
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
