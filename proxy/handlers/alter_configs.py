"""Handles CreateTopics, AlterConfigs and IncrementalAlterConfigs (docs/semantics.md 9.4).

The proxy keeps the tier settings, and the broker keeps all other settings. The proxy removes the tier settings from the
request before it forwards it. When the broker has answered for the topic without an error, the proxy records the
settings.

The proxy looks the topics up with its own rights, so the broker must have allowed the client to change them first. The
proxy sends the request with `validateOnly` on the client's connection before. The broker then checks the rights and the
values, and changes nothing. It does so even if the request changes only tier settings, since a broker also checks a
resource that has no entries. The broker answers for each topic separately. A topic that it refuses here stays refused,
with the broker's error.

A request with `validateOnly` records nothing. If the client disconnects while settings are recorded, the recording
continues: the broker's part is done, and no transaction may stay open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from uuid import UUID

from protocol.api_keys import ApiKey, check_version
from protocol.apis.config_entries import (
    TOPIC_RESOURCE,
    ConfigAnswer,
    ConfigRequest,
    ConfigResource,
    ConfigResponse,
    only_validate,
    parse_config_request,
    parse_config_response,
    replace_changes,
    replace_error,
    setting,
)
from protocol.errors import ErrorCode
from protocol.splice import Splice, splice
from protocol.steps import Steps
from proxy.handlers.describe_configs import tier_entries
from proxy.handlers.topic_tier_configs import Change, Plan, Refusal, TopicTierConfigs
from proxy.handlers.turns import in_slices, in_turns, slices_of
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Prepare, Respond, Spawn
from tiers.config.topic_settings import TIER_DEFAULTS, InvalidTierConfigError, TierValue, tier_values
from tiers.errors import RemoteLogError

logger = logging.getLogger(__name__)

UNKNOWN_KEY = "tidegate.refused"
"""A setting that every broker rejects. Only a client that may alter the topic learns of the rejection."""

_NOT_RECORDED = Refusal(
    ErrorCode.REQUEST_TIMED_OUT, "The topic's tier settings were not recorded; try again.", is_final=True
)
_NOT_CHECKED = Refusal(
    ErrorCode.REQUEST_TIMED_OUT, "The broker did not check the topic's settings; try again.", is_final=True
)
_RECORD_WITHIN_MS = 60_000
"""After this time, no further topic's settings are recorded. The client must try again for the remaining topics."""
_OUR_FAULT = (ErrorCode.NONE, ErrorCode.INVALID_CONFIG, ErrorCode.INVALID_REQUEST)


class AlterConfigsHandler:
    """Implements `Handler` for the three APIs that change topic settings."""

    def __init__(self, configs: TopicTierConfigs, spawn: Spawn) -> None:
        self._configs = configs
        self._spawn = spawn

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        check_version(exchange.request.api_key, exchange.request.api_version)
        state = _State(self._configs, self._spawn, exchange)
        return Prepare(state.prepare), state.respond


class _State:
    __slots__ = ("_configs", "_exchange", "_plans", "_request", "_spawn")

    _request: ConfigRequest

    def __init__(self, configs: TopicTierConfigs, spawn: Spawn, exchange: Exchange) -> None:
        self._configs = configs
        self._spawn = spawn
        self._exchange = exchange
        self._plans: Mapping[str, Plan] = {}

    async def prepare(self) -> Forward:
        frame = self._exchange.request.frame
        self._request, looks_up = await in_turns(_parsed_request(frame))
        request = self._request
        denied = await self._denied(frame) if looks_up else {}
        plans = self._plans = await self._configs.plan(request, denied)
        return Forward(await in_turns(_forwarded(frame, request, plans)), hold_bytes=None)

    async def _denied(self, frame: bytes) -> Mapping[str, Refusal]:
        """Returns the topics that the broker does not let the client change, with the broker's errors."""
        request = self._request
        checked = await in_turns(_only_checked(frame, request))
        asked = self._exchange.try_forward(checked)
        payload = None if asked is None else await asked
        return await in_turns(_denials(request, payload))

    def respond(self, response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        creates = self._request.api_key == ApiKey.CREATE_TOPICS
        return self._complete(response) if self._plans or creates else (response,)

    async def _complete(self, payload: memoryview) -> Buffers:
        api_key, version = self._request.api_key, self._request.version
        response = await in_turns(parse_config_response.steps(api_key, version, payload))
        refused = await self._record_all(response.answers)
        splices = await in_turns(self._splices(response, payload, refused))
        return (await in_turns(splice.steps(payload, splices)),) if splices else (payload,)

    def _splices(
        self,
        response: ConfigResponse,
        payload: memoryview,
        refused: Mapping[str, Refusal],
    ) -> Steps[list[Splice]]:
        """Returns the splices for the proxy's refusals and the tier settings."""
        splices: list[Splice] = []
        for answer in response.answers:
            yield
            if answer.resource_type != TOPIC_RESOURCE:
                continue
            plan = self._plans.get(answer.name)
            if isinstance(plan, Refusal):
                if plan.is_final or answer.error_code in _OUR_FAULT:
                    splices.append(replace_error(response, answer, plan.code, plan.message))
                continue
            if answer.error_code != ErrorCode.NONE:
                continue
            refusal = refused.get(answer.name)
            if refusal is not None:
                splices.append(replace_error(response, answer, refusal.code, refusal.message))
            splices += yield from self._shown(response, payload, answer, plan)
        return splices

    def _shown(
        self, response: ConfigResponse, payload: memoryview, answer: ConfigAnswer, change: Change | None
    ) -> Steps[list[Splice]]:
        """Returns the splices that show the tier settings in the configuration of a created topic."""
        own = {} if change is None else {key: value for key, value in change.changes.items() if value is not None}
        values: Mapping[str, TierValue] = tier_values(self._configs.rule(answer.name), own)
        return (yield from tier_entries(response, payload, answer, values, frozenset(), with_synonyms=False))

    async def _record_all(self, answers: Sequence[ConfigAnswer]) -> Mapping[str, Refusal]:
        """Records the changes that the broker accepted. Returns the refusals of the changes that were not recorded."""
        accepted: list[tuple[Change, ConfigAnswer]] = []
        async for part in slices_of(answers):
            for answer in part:
                plan = self._plans.get(answer.name) if answer.resource_type == TOPIC_RESOURCE else None
                if isinstance(plan, Change) and plan.changes and not answer.error_code:
                    accepted.append((plan, answer))
        if self._request.validate_only or not accepted:
            return {}
        refused: dict[str, Refusal] = {change.topic: _NOT_RECORDED for change, _ in accepted}

        async def record(one: tuple[Change, ConfigAnswer]) -> None:
            change, answer = one
            refusal = await self._record(change, answer)
            if refusal is None:
                refused.pop(change.topic, None)
            else:
                refused[change.topic] = refusal

        async def record_all() -> None:
            await in_slices(accepted, record, _RECORD_WITHIN_MS)

        await asyncio.wait((self._spawn(record_all()),))
        return refused

    async def _record(self, change: Change, answer: ConfigAnswer) -> Refusal | None:
        topic_id = None if not answer.topic_id_bytes else UUID(bytes=answer.topic_id_bytes)
        try:
            await self._configs.record(change, topic_id if topic_id and topic_id.int else None)
        except InvalidTierConfigError as error:
            logger.warning(
                "the topic's tier settings were refused: another change was recorded in between, and they conflict",
                extra={"topic": change.topic, "error": str(error)},
            )
            return Refusal(error.code, str(error))
        except (RemoteLogError, TimeoutError) as error:
            logger.warning(
                "the topic's tier settings were not recorded: the client must try again",
                extra={"topic": change.topic, "error": str(error) or "the deadline has passed"},
            )
            return _NOT_RECORDED
        except Exception:  # a defect may fail this topic, but must not end the server's task group
            logger.exception(
                "the topic's tier settings were not recorded: the client must try again", extra={"topic": change.topic}
            )
            return _NOT_RECORDED
        return None


def _parsed_request(frame: bytes) -> Steps[tuple[ConfigRequest, bool]]:
    """Returns the request, and whether the proxy asks brokers about a change. Raises `ProtocolError`."""
    request = yield from parse_config_request.steps(frame)
    looks_up = False
    for each in request.resources:
        looks_up = looks_up or _is_looked_up(request, each)
        yield
    return request, looks_up


def _denials(request: ConfigRequest, payload: memoryview | None) -> Steps[Mapping[str, Refusal]]:
    """Returns the topics that the broker refuses in its answer. `payload` is None if the connection to it is gone."""
    said: dict[str, Refusal] = {}
    if payload is not None:
        response = yield from parse_config_response.steps(request.api_key, request.version, payload)
        for answer in response.answers:
            if answer.resource_type == TOPIC_RESOURCE:
                said[answer.name] = Refusal(answer.error_code, answer.error_message, is_final=True)
            yield
    denials: dict[str, Refusal] = {}
    for resource in request.resources:
        refusal = said.get(resource.name, _NOT_CHECKED)
        if resource.resource_type == TOPIC_RESOURCE and refusal.code != ErrorCode.NONE:
            denials[resource.name] = refusal
        yield
    return denials


def _is_looked_up(request: ConfigRequest, resource: ConfigResource) -> bool:
    """Returns whether the proxy asks brokers about the change. An existing topic may be tiered already."""
    if request.api_key == ApiKey.CREATE_TOPICS:
        return any(change.name in TIER_DEFAULTS for change in resource.changes)
    return resource.resource_type == TOPIC_RESOURCE


def _without_tier_settings(request: ConfigRequest, resource: ConfigResource) -> list[Splice]:
    kept = [change for change in resource.changes if change.name not in TIER_DEFAULTS]
    return [replace_changes(request, resource, kept)] if len(kept) < len(resource.changes) else []


def _only_checked(frame: bytes, request: ConfigRequest) -> Steps[bytes]:
    """Returns the request with `validateOnly` and without tier settings."""
    splices = [only_validate(request)]
    for resource in request.resources:
        splices += _without_tier_settings(request, resource)
        yield
    return (yield from splice.steps(frame, sorted(splices)))


def _forwarded(frame: bytes, request: ConfigRequest, plans: Mapping[str, Plan]) -> Steps[bytes]:
    """Returns the request without tier settings, in which the broker must refuse what the proxy refuses."""
    splices = []
    for resource in request.resources:
        yield
        plan = plans.get(resource.name) if resource.resource_type == TOPIC_RESOURCE else None
        if isinstance(plan, Refusal):
            splices.append(replace_changes(request, resource, [setting(request, UNKNOWN_KEY, "")]))
        elif plan is not None:
            splices += _without_tier_settings(request, resource)
    return (yield from splice.steps(frame, splices)) if splices else frame
