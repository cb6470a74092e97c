"""Guards what is the remote log's own: its topics, and the group and the transactional ids of its owners.

Its topics are those of the remote log metadata and of the failed deletions. Clients may not delete them or add
partitions to them through the proxy, and the broker answers for the other topics of a request, as always.
`topic_tier_configs` refuses to create these topics and to change their settings. `delete_records` refuses to delete
their records. Operators may move their replicas. The brokers must refuse Produce requests to them, by ACLs: a Produce
request names topics between its record sets, so the proxy would have to walk every request. The readers of the topics
ignore what other programs wrote outside of a transaction (`committed_records`).

A broker creates a missing topic that a Metadata request names, with the settings of any topic
(`auto.create.topics.enable`). The own topics need other settings, and the owners create them. So a request that names
one of them goes on without the permission to create topics. Up to version 3 every request has that permission. There
the name is replaced, and the client gets the error of a missing right.

See docs/semantics.md 9.5 for the ids. A client that initializes a producer with an owner's transactional id fences the
owner. A member that joins the owners' group, or commits offsets for it, takes their partitions away. The proxy itself
refuses such a request with the error that a broker gives to a client without the right. It reads only the ids at the
head of a request, and all other requests leave as they arrive. Clients may describe and list the group and the
transactions. Produce requests are not checked: a batch that names an owner's transactional id also needs the producer
id and the epoch of that owner's current session. The brokers' ACLs protect the ids from clients that bypass the proxy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from uuid import UUID

from protocol.addresses import AddressOf, rewrite_addresses
from protocol.api_keys import ApiKey, check_version
from protocol.apis.coordinated_ids import (
    GROUP_APIS,
    TRANSACTION_APIS,
    CoordinatedIds,
    deleted_groups,
    peek_ids,
    refusal,
    with_refused_groups,
    without_groups,
)
from protocol.apis.named_topics import NamedTopic, Refusal, Replaced, named_topics, with_refusals, without_topics
from protocol.errors import ErrorCode
from protocol.header import parse_request_header
from protocol.primitives import Buffer
from protocol.schema import compile_message
from protocol.steps import Steps
from proxy.handlers.addresses import with_addresses
from proxy.handlers.turns import Decision, decide_in_turns, patched_by
from proxy.wire.exchange import (
    Answer,
    BegunRequest,
    Buffers,
    CutThrough,
    Exchange,
    Forward,
    Handler,
    HeldRequest,
    PrefixHandler,
    Prepare,
    Request,
    Respond,
)

_METADATA_REFUSAL = Refusal(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "")
REFUSAL = Refusal(
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    "This topic is one of the remote log's own: it cannot be changed through the proxy.",
)
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
        return Forward(frame, hold_bytes=None), refusing(ApiKey.METADATA, version, replaced, address_of)

    def _refusal_of(self, topic: NamedTopic) -> Refusal | None:
        return _METADATA_REFUSAL if topic.name in self._own_topics else None


def _without_creation(frame: bytes, version: int) -> Steps[bytes]:
    plan = compile_message(ApiKey.METADATA, version, "Request")
    select = plan.selector((), ("AllowAutoTopicCreation",))
    ((allows,),) = (yield from select.steps(frame, parse_request_header(frame).body_position)).structs
    return b"".join((frame[: allows.start], b"\x00", frame[allows.end :]))


class MetadataTopicGuard:
    """Implements `Handler` for DeleteTopics and CreatePartitions. `topic_name` returns a topic's latest known name,
    in any thread."""

    def __init__(self, own_topics: Collection[str], topic_name: Callable[[UUID], str | None]) -> None:
        self._own_topics = own_topics
        self._topic_name = topic_name

    def _refusal_of(self, topic: NamedTopic) -> Refusal | None:
        name = topic.name
        if name is None and topic.topic_id is not None:
            name = self._topic_name(topic.topic_id)
        return REFUSAL if name in self._own_topics else None

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        request = exchange.request
        check_version(request.api_key, request.api_version)
        return decide_in_turns(self.guarded(request))

    def guarded(
        self, request: Request, refusal_of: Callable[[NamedTopic], Refusal | None] = lambda topic: None
    ) -> Steps[tuple[Forward, Respond | None]]:
        """Returns the request without our own topics, and without others that `refusal_of` refuses.

        Raises `ProtocolError`."""
        frame, replaced = yield from without_topics.steps(
            request.frame,
            request.api_key,
            request.api_version,
            lambda topic: self._refusal_of(topic) or refusal_of(topic),
        )
        if not replaced:
            return Forward(frame), None
        return Forward(frame, hold_bytes=None), refusing(request.api_key, request.api_version, replaced)


def refusing(
    api_key: int, version: int, replaced: Mapping[str, Replaced], address_of: AddressOf | None = None
) -> Respond:
    """Returns what adds the refusals of the replaced topics to a response, and rewrites its addresses if it has any."""

    def refused(response: memoryview) -> Steps[Buffers]:
        patched: Buffer = yield from with_refusals.steps(response, api_key, version, replaced)
        if address_of is not None:
            patched = yield from rewrite_addresses.steps(api_key, version, patched, address_of)
        return (patched,)

    return patched_by(refused)


@dataclass(frozen=True, slots=True)
class OwnIds:
    """The group of the owners. Their transactional ids begin with the group's id and a hyphen."""

    group_id: str

    def refusal_of(self, ids: CoordinatedIds) -> ErrorCode | None:
        """Returns the error for a client that uses `ids`. None: they are not the owners'."""
        if ids.transactional_id is not None and ids.transactional_id.startswith(f"{self.group_id}-"):
            return ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
        return ErrorCode.GROUP_AUTHORIZATION_FAILED if ids.group_id == self.group_id else None


class OwnIdsGuard:
    """Implements `PrefixHandler` for the requests to coordinators, and `Handler` for those that it refuses."""

    def __init__(self, own: OwnIds) -> None:
        self._own = own

    def on_prefix(self, begun: BegunRequest, prefix: memoryview) -> tuple[CutThrough, Respond | None] | HeldRequest:
        check_version(begun.api_key, begun.api_version)
        if self._own.refusal_of(peek_ids(prefix)) is None:
            return CutThrough(), None
        return HeldRequest(self)

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        frame = exchange.request.frame
        code = self._own.refusal_of(peek_ids(frame))
        assert code is not None
        return decide_in_turns(self._refused(frame, code))

    def _refused(self, frame: bytes, code: ErrorCode) -> Steps[Decision]:
        return Answer(((yield from refusal.steps(frame, code)),)), None


class OwnGroupGuard:
    """Implements `Handler` for DeleteGroups, which names many groups. The broker answers for the other ones."""

    def __init__(self, own: OwnIds) -> None:
        self._own = own

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        request = exchange.request
        check_version(request.api_key, request.api_version)
        return decide_in_turns(self._guarded(request))

    def _guarded(self, request: Request) -> Steps[Decision]:
        if self._own.group_id not in (yield from deleted_groups.steps(request.frame)):
            return Forward(request.frame), None
        frame = yield from without_groups.steps(request.frame, frozenset((self._own.group_id,)))
        return Forward(frame, hold_bytes=None), refusing_group(request.api_version, self._own.group_id)


def refusing_group(version: int, group_id: str) -> Respond:
    """Returns what adds the refusal of the group to a response."""

    def refused(response: memoryview) -> Steps[Buffers]:
        code = ErrorCode.GROUP_AUTHORIZATION_FAILED
        return ((yield from with_refused_groups.steps(response, version, [group_id], code)),)

    return patched_by(refused)


def own_ids_guards(group_id: str) -> tuple[dict[int, Handler], dict[int, PrefixHandler]]:
    """Returns the guards by API key: those that hold requests, and those that decide by a prefix."""
    own = OwnIds(group_id)
    guard = OwnIdsGuard(own)
    return {ApiKey.DELETE_GROUPS: OwnGroupGuard(own)}, dict.fromkeys((*TRANSACTION_APIS, *GROUP_APIS), guard)
