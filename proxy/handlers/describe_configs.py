"""Handles DescribeConfigs: shows a topic's tier settings as the proxy applies them (docs/semantics.md 9.4).

The total retention is no setting of Kafka, and brokers know `remote.copy.lag.*` since Kafka 4.4. A setting that the
broker does not answer is shown for a tiered topic, for a topic that has it, and to a client that asks for it by name.

All other settings are shown as the broker answered them. The source of a topic's own tier setting is
DYNAMIC_TOPIC_CONFIG, as in Kafka. The source of a setting in the proxy's settings file is STATIC_BROKER_CONFIG, like
that of a setting in a broker's file. The source of any other setting is the default.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from protocol.api_keys import ApiKey, check_version
from protocol.apis.config_entries import (
    TOPIC_RESOURCE,
    ConfigAnswer,
    ConfigEntry,
    ConfigResponse,
    new_entry,
    parse_config_response,
    parse_describe_configs_request,
    read_entries,
    replace_entries,
    with_value,
    write_synonym,
)
from protocol.errors import ErrorCode
from protocol.splice import Splice, splice
from protocol.steps import Steps
from proxy.handlers.topic_tier_configs import TopicTierConfigs
from proxy.handlers.turns import in_turns
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Prepare, Respond
from tiers.config.topic_policy import COPY_LAG_BYTES, COPY_LAG_MS, PAUSE_KEYS
from tiers.config.topic_settings import REMOTE_STORAGE_ENABLE, TIER_DEFAULTS, TierValue, is_boolean
from tiers.config.total_retention import TOTAL_KEYS

DYNAMIC_TOPIC_CONFIG, STATIC_BROKER_CONFIG, DEFAULT_CONFIG = 1, 4, 5
_BOOLEAN, _LONG = 1, 5


class DescribeConfigsHandler:
    """Implements `Handler`."""

    def __init__(self, configs: TopicTierConfigs) -> None:
        self._configs = configs

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        request = exchange.request
        check_version(ApiKey.DESCRIBE_CONFIGS, request.api_version)
        state = _State(self._configs, request.api_version, exchange.node_id)
        return Prepare(lambda: state.prepare(request.frame)), state.complete


@dataclass(slots=True)
class _State:
    configs: TopicTierConfigs
    version: int
    node_id: int | None
    keys: Mapping[str, Collection[str] | None] = field(default_factory=dict)
    """The keys that the client asks for, by topic."""
    with_synonyms: bool = False

    async def prepare(self, frame: bytes) -> Forward:
        self.keys, self.with_synonyms = await in_turns(_asked(frame))
        return Forward(frame, hold_bytes=None)

    async def complete(self, payload: memoryview) -> Buffers:
        if not self.keys:
            return (payload,)
        response, answers = await in_turns(self._shown(payload))
        values = await self.configs.values([answer.name for answer in answers], self.node_id) if answers else {}
        splices = await in_turns(self._splices(response, payload, answers, values))
        return (await in_turns(splice.steps(payload, splices)),) if splices else (payload,)

    def _shown(self, payload: memoryview) -> Steps[tuple[ConfigResponse, Sequence[ConfigAnswer]]]:
        """Returns the response, and the answers in which tier settings are shown, one for a topic.

        Raises `ProtocolError`."""
        response = yield from parse_config_response.steps(ApiKey.DESCRIBE_CONFIGS, self.version, payload)
        asked = {name for name, keys in self.keys.items() if not keys or TIER_DEFAULTS.keys() & set(keys)}
        answers: dict[str, ConfigAnswer] = {}
        for answer in response.answers:
            yield
            if answer.resource_type == TOPIC_RESOURCE and answer.error_code == ErrorCode.NONE and answer.name in asked:
                answers.setdefault(answer.name, answer)
        return response, list(answers.values())

    def _splices(
        self,
        response: ConfigResponse,
        payload: memoryview,
        answers: Sequence[ConfigAnswer],
        values: Mapping[str, Mapping[str, TierValue]],
    ) -> Steps[list[Splice]]:
        """Returns the splices that show the tier settings in the answers."""
        splices: list[Splice] = []
        for answer in answers:
            if answer.name in values:
                keys = self.keys[answer.name]
                wanted = TIER_DEFAULTS.keys() & set(keys) if keys else TIER_DEFAULTS.keys()
                shown = wanted - _hidden(keys, values[answer.name])
                splices += yield from tier_entries(
                    response, payload, answer, values[answer.name], shown, with_synonyms=self.with_synonyms
                )
        return splices


def _asked(frame: bytes) -> Steps[tuple[Mapping[str, Collection[str] | None], bool]]:
    """Returns the requested keys by topic, and whether the client wants synonyms. Raises `ProtocolError`."""
    resources, with_synonyms = yield from parse_describe_configs_request.steps(frame)
    return {one.name: one.keys for one in resources if one.resource_type == TOPIC_RESOURCE}, with_synonyms


def _hidden(asked: Collection[str] | None, values: Mapping[str, TierValue]) -> set[str]:
    """Returns the keys that a client that knows only Kafka's settings does not expect. `asked`: all keys if empty."""
    if asked:
        return set()
    is_tiered = values[REMOTE_STORAGE_ENABLE].value == "true"
    hidden = PAUSE_KEYS if is_tiered else (*PAUSE_KEYS, *TOTAL_KEYS, COPY_LAG_MS, COPY_LAG_BYTES)
    return {key for key in hidden if not values[key].is_own}


def tier_entries(
    response: ConfigResponse,
    payload: memoryview,
    answer: ConfigAnswer,
    values: Mapping[str, TierValue],
    wanted: Collection[str],
    *,
    with_synonyms: bool,
) -> Steps[list[Splice]]:
    """Returns the splices that show the tier settings of one topic in its entries.

    Adds the settings in `wanted` that are missing from the broker's answer."""
    entries = yield from read_entries.steps(response, payload, answer)
    present = {entry.name for entry in entries}
    raw = []
    for entry in entries:
        is_ours = entry.name in values
        raw.append(_shown(response, entry, values[entry.name], with_synonyms) if is_ours else entry.raw)
        yield
    for key in sorted(set(wanted) - present):
        kind = _BOOLEAN if is_boolean(key) else _LONG
        raw.append(new_entry(response, key, values[key].value, _source(values[key]), kind))
        yield
    if raw == [entry.raw for entry in entries]:
        return []
    return [replace_entries(response, answer, raw)]


def _source(value: TierValue) -> int:
    if value.is_own:
        return DYNAMIC_TOPIC_CONFIG
    return STATIC_BROKER_CONFIG if value.is_from_file else DEFAULT_CONFIG


def _shown(response: ConfigResponse, entry: ConfigEntry, value: TierValue, with_synonyms: bool) -> bytes:
    source = _source(value)
    if source == DEFAULT_CONFIG == entry.source:
        return entry.raw
    synonyms = [synonym for synonym in entry.synonyms if synonym.source == DEFAULT_CONFIG]
    if with_synonyms and source != DEFAULT_CONFIG:
        # The synonym of a topic's own setting has the name of the topic's setting. The others have the broker's name.
        name = synonyms[0].name if synonyms and source == STATIC_BROKER_CONFIG else entry.name
        synonyms.insert(0, write_synonym(response, name, value.value, source))
    return with_value(response, entry, value.value, source, synonyms)
