"""Handles Metadata: rewrites broker addresses, and creates none of the remote log's own topics.

A broker creates a missing topic that a Metadata request names, with the settings of any topic
(`auto.create.topics.enable`). The remote log's own topics need other settings, and the owners create them. So a request
that names one of them goes on without the permission to create topics. Up to version 3 every request has that
permission. There the name is replaced, and the client gets the error of a missing right.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from protocol.addresses import AddressOf, rewrite_addresses
from protocol.api_keys import ApiKey, check_version
from protocol.apis.named_topics import NamedTopic, Refusal, Replaced, named_topics, with_refusals, without_topics
from protocol.errors import ErrorCode
from protocol.header import parse_request_header
from protocol.schema import compile_message
from protocol.steps import Steps
from proxy.handlers.addresses import with_addresses
from proxy.handlers.turns import Decision, decide_in_turns, patched_by
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Prepare, Request, Respond

_REFUSAL = Refusal(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "")
_ALLOWS_CREATION_FROM = 4
"""The first version with AllowAutoTopicCreation."""


class MetadataHandler:
    """Implements `Handler`."""

    def __init__(self, own_topics: Collection[str]) -> None:
        self._own_topics = frozenset(own_topics)
        self._own_names = [name.encode() for name in own_topics]

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        request, address_of = exchange.request, exchange.address_of
        check_version(ApiKey.METADATA, request.api_version)
        if not any(name in request.frame for name in self._own_names):
            respond = with_addresses(ApiKey.METADATA, request.api_version, address_of)
            return Forward(request.frame, hold_bytes=None), respond
        return decide_in_turns(self._guarded(request, address_of))

    def _guarded(self, request: Request, address_of: AddressOf) -> Steps[Decision]:
        version = request.api_version
        if version >= _ALLOWS_CREATION_FROM:
            frame = request.frame
            if any(map(self._refusal_of, (yield from named_topics.steps(frame)))):
                frame = yield from _without_creation(frame, version)
            return Forward(frame, hold_bytes=None), with_addresses(ApiKey.METADATA, version, address_of)
        frame, replaced = yield from without_topics.steps(request.frame, ApiKey.METADATA, version, self._refusal_of)
        return Forward(frame, hold_bytes=None), refusing(version, replaced, address_of)

    def _refusal_of(self, topic: NamedTopic) -> Refusal | None:
        return _REFUSAL if topic.name in self._own_topics else None


def _without_creation(frame: bytes, version: int) -> Steps[bytes]:
    plan = compile_message(ApiKey.METADATA, version, "Request")
    select = plan.selector((), ("AllowAutoTopicCreation",))
    ((allows,),) = (yield from select.steps(frame, parse_request_header(frame).body_position)).structs
    return b"".join((frame[: allows.start], b"\x00", frame[allows.end :]))


def refusing(version: int, replaced: Mapping[str, Replaced], address_of: AddressOf) -> Respond:
    """Returns what adds the refusals of the replaced topics to a response."""

    def refused(response: memoryview) -> Steps[Buffers]:
        patched = yield from with_refusals.steps(response, ApiKey.METADATA, version, replaced)
        return ((yield from rewrite_addresses.steps(ApiKey.METADATA, version, patched, address_of)),)

    return patched_by(refused)
