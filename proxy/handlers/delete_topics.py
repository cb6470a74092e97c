"""Handles DeleteTopics: records that a client is about to delete a tiered topic, before the brokers get the request.

See docs/semantics.md 9.2.

If no broker knows a topic, that does not prove that the topic was deleted: a cluster whose KRaft log was restored from
a copy lacks topics as well. The record and the brokers that soon do not know the topic's id are the proof, whatever
answer comes to the client (`tiers/tasks/deletion/topic_deletion.py`).

The proxy first asks for the ids of the topics, and whether the client may delete them. It asks on the client's
connection, and so with the client's rights: the right to delete a topic implies the right to see its id. The brokers
refuse all other topics, or delete them without a record. Then an operator decides about the remote data.

The proxy refuses a topic with an error that clients retry if the deletion cannot be recorded, or if it is unknown
whether the topic is tiered. The other topics of the request go on.
"""

from __future__ import annotations

import logging
from uuid import UUID

from protocol.api_keys import ApiKey, check_version
from protocol.apis.metadata import MetadataReader
from protocol.apis.named_topics import NamedTopic, Refusal, named_topics
from protocol.errors import ErrorCode
from protocol.header import build_request_header, response_body_position
from protocol.primitives import EMPTY_TAGGED_SECTION, write_array_length, write_string
from protocol.steps import Steps
from proxy.handlers.guards import MetadataTopicGuard
from proxy.handlers.turns import Decision, decided_later, in_slices, in_turns
from proxy.wire.exchange import BrokerGoneError, Exchange, Prepare, Request, Respond
from tiers.errors import RemoteLogError
from tiers.metadata.changes import MetadataChanges
from tiers.metadata.metadata_log import FreshMetadata

logger = logging.getLogger(__name__)

_NO_ID = bytes(16)
_METADATA_VERSION = 12
"""Brokers know this version since Kafka 3.1. It names topics by id, too."""
_NO_CREATION_BUT_RIGHTS = b"\x00\x01"
_DELETE = 1 << 6
"""Kafka's bit of the operation DELETE."""
_SLICE_BYTES = 256
"""The bytes of partitions between two steps: as long as a step takes."""
_MAX_WAIT_MS = 10_000
"""How long records begin to be written. A client waits a little longer than this at most."""
_NOT_RECORDED = "a topic was not deleted, because the deletion could not be recorded: the client must try again"
_REFUSAL = Refusal(
    ErrorCode.REQUEST_TIMED_OUT, "The proxy could not record the deletion, so the topic was not deleted. Try again."
)


class DeleteTopicsHandler:
    """Implements `Handler`."""

    def __init__(
        self,
        guard: MetadataTopicGuard,
        metadata: FreshMetadata,
        changes: MetadataChanges,
        max_wait_ms: int = _MAX_WAIT_MS,
    ) -> None:
        self._guard = guard
        self._metadata = metadata
        self._changes = changes
        self._max_wait_ms = max_wait_ms

    def on_request(self, exchange: Exchange) -> tuple[Prepare, Respond]:
        check_version(ApiKey.DELETE_TOPICS, exchange.request.api_version)
        return decided_later(lambda: self._decide(exchange))

    async def _decide(self, exchange: Exchange) -> Decision:
        refused: dict[UUID, str] = {}
        for request in await in_turns(_metadata_requests(exchange.request)):
            asked = exchange.try_forward(request)
            if asked is None:
                raise BrokerGoneError
            refused |= await in_turns(_deletable(await asked))
        await in_slices(list(refused), lambda topic_id: self._leave_out(topic_id, refused))
        await in_slices(list(refused), lambda topic_id: self._record(topic_id, refused), self._max_wait_ms)
        names, ids = set(refused.values()), refused.keys()

        def refusal_of(topic: NamedTopic) -> Refusal | None:
            return _REFUSAL if topic.name in names or topic.topic_id in ids else None

        return await in_turns(self._guard.guarded(exchange.request, refusal_of))

    async def _leave_out(self, topic_id: UUID, refused: dict[UUID, str]) -> None:
        """Takes the topic out of `refused` if it is not tiered."""
        fields = {"topic": refused[topic_id], "id": str(topic_id)}
        try:
            state = self._metadata.state
            if not (state.is_tiered(topic_id) or state.topic_tier_config(topic_id)):
                del refused[topic_id]
        except RemoteLogError:
            return  # it stays refused, unless its deletion can be recorded
        except Exception:  # a defect may fail this topic, but must not close the client's connection
            logger.exception(_NOT_RECORDED, extra=fields)

    async def _record(self, topic_id: UUID, refused: dict[UUID, str]) -> None:
        """Records the deletion of a tiered topic, and then takes the topic out of `refused`."""
        name = refused[topic_id]
        fields = {"topic": name, "id": str(topic_id)}
        try:
            await self._changes.put_topic_deletion(topic_id, name, is_confirmed=False)
            logger.info("a client is about to delete a tiered topic", extra=fields)
        except RemoteLogError as error:
            logger.warning(_NOT_RECORDED, extra={**fields, "error": str(error)})
        except Exception:  # a defect may fail this topic, but must not close the client's connection
            logger.exception(_NOT_RECORDED, extra=fields)
        else:
            del refused[topic_id]


def _metadata_requests(request: Request) -> Steps[list[bytes]]:
    """Returns requests for the topics that the client wants to delete. They create no topic.

    A broker ignores the names in a request that has an id, so names and ids have a request each."""
    named, with_ids = list[bytes](), list[bytes]()
    for topic in (yield from named_topics.steps(request.frame)):
        topic_id = _NO_ID if topic.topic_id is None else topic.topic_id.bytes
        asked = topic_id + write_string(topic.name, compact=True) + EMPTY_TAGGED_SECTION
        (named if topic.topic_id is None else with_ids).append(asked)
        yield
    header = build_request_header(ApiKey.METADATA, _METADATA_VERSION, request.correlation_id, "tidegate")
    return [
        b"".join(
            (
                header,
                write_array_length(len(topics), compact=True),
                *topics,
                _NO_CREATION_BUT_RIGHTS,
                EMPTY_TAGGED_SECTION,
            )
        )
        for topics in (named, with_ids)
        if topics
    ]


def _deletable(payload: memoryview) -> Steps[dict[UUID, str]]:
    """Returns the topics that exist and that the client may delete, with their names."""
    body = payload[response_body_position(ApiKey.METADATA, _METADATA_VERSION, payload) :]
    found: dict[UUID, str] = {}
    for topic in MetadataReader(body, _METADATA_VERSION).read(_SLICE_BYTES):
        if topic is not None and topic.name is not None and (topic.operations or 0) & _DELETE:
            found[topic.topic_id] = topic.name
        yield
    return found
