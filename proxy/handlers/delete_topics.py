"""Handles DeleteTopics: records the topics that the brokers deleted, so that owners delete the remote data.

See docs/semantics.md 9.2.

If no broker knows a topic, that does not prove that the topic was deleted: a cluster whose KRaft log was restored from
a copy lacks topics as well. The answer to DeleteTopics is the proof, and only a proxy sees it. The proxy records the
topic's id in the metadata. The owners delete the segments later, if every broker calls that id unknown.

Answers below version 6 have only names. Therefore the proxy asks for the ids of the names before it forwards the
request. It asks on the client's connection, and so with the client's rights: the right to delete a topic implies the
right to see its id. After an answer without an error that id is deleted, by this request or by an earlier one. If the
broker does not tell the ids, the proxy uses the ids that the cluster told last. The same argument holds for those ids.

The client gets the broker's answer in any case, and waits for the record for a few seconds at most. If the record is
missing, the owners delete the remote data when an operator says that the topic was deleted
(`tiers/tasks/deletion/missing_topics.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Protocol
from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.apis.metadata import MetadataReader
from protocol.apis.named_topics import deleted_topics, named_topics
from protocol.errors import ErrorCode
from protocol.header import build_request_header, response_body_position
from protocol.primitives import EMPTY_TAGGED_SECTION, write_array_length, write_string
from protocol.steps import Steps
from proxy.handlers.addresses import check_version
from proxy.handlers.base import ClusterTopology, Spawn
from proxy.handlers.metadata_topic_guard import MetadataTopicGuard
from proxy.handlers.turns import in_turns, slices_of
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, HandlerState, Prepare
from tiers.bounded_gather import bounded_gather
from tiers.errors import RemoteLogError

logger = logging.getLogger(__name__)

_ANSWERED_BY_ID = 6
_NO_ID = bytes(16)
_METADATA_VERSION = 12
"""Brokers know this version since Kafka 3.1. It has topic ids."""
_SLICE_BYTES = 256
"""The bytes of partitions between two steps: as long as a step takes."""
_MAX_WAIT_MS = 5_000
"""The longest time that a client waits for the records of its topics. The proxy continues to write them after that."""
_AT_ONCE = 16
_NOT_RECORDED = (
    "a topic was deleted, but the record of the deletion may be missing: if the topic is tiered, its remote data is"
    " deleted only after `tidegate tier missing-topics forget`"
)


class TopicDeletions(Protocol):
    """The methods of `RemoteLogMetadataManager` that this handler needs. They need no ownership."""

    def is_tiered(self, topic_id: UUID) -> bool: ...

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]: ...

    async def put_topic_deletion(self, topic_id: UUID, topic: str) -> None: ...


class DeleteTopicsHandler:
    """Implements `Handler`."""

    def __init__(
        self,
        guard: MetadataTopicGuard,
        topology: ClusterTopology,
        deletions: TopicDeletions,
        spawn: Spawn,
        max_wait_ms: int = _MAX_WAIT_MS,
    ) -> None:
        self._guard = guard
        self._topology = topology
        self._deletions = deletions
        self._spawn = spawn
        self._max_wait_ms = max_wait_ms

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, HandlerState | None]:
        check_version(ApiKey.DELETE_TOPICS, exchange.request.api_version)
        state = _State(self, exchange.request.api_version)
        return Prepare(lambda: self._prepare(state, exchange)), state

    async def _prepare(self, state: _State, exchange: Exchange) -> Forward:
        frame = exchange.request.frame

        forward, state.guarded = await in_turns(self._guard.guarded(exchange.request))
        ids = await in_turns(self._known_ids(frame))
        if state.version < _ANSWERED_BY_ID and ids:
            ids |= await self._current_ids(list(ids), exchange)
        state.known = ids
        return Forward(forward.frame, hold_bytes=None)

    def _known_ids(self, frame: bytes) -> Steps[dict[str, UUID | None]]:
        ids: dict[str, UUID | None] = {}
        for topic in (yield from named_topics.steps(frame)):
            if topic.name is not None and not self._guard.keeps_away(topic):
                ids[topic.name] = self._topology.topic_id(topic.name)
            yield
        return ids

    async def _current_ids(self, names: Sequence[str], exchange: Exchange) -> Mapping[str, UUID]:
        request = exchange.request
        frame = await in_turns(_metadata_request(names, request.correlation_id))
        asked = exchange.try_forward(frame)
        if asked is None:  # the connection to the broker is gone
            return {}
        payload = await asked
        return await in_turns(_topic_ids(payload))

    async def record(self, deleted: Mapping[UUID, str]) -> None:
        """Records the deletions. Returns when all are recorded, or after `max_wait_ms`."""
        task = self._spawn(self._record_all(deleted))
        await asyncio.wait([task], timeout=self._max_wait_ms / 1000)

    async def _record_all(self, deleted: Mapping[UUID, str]) -> None:
        async def record(topic_id: UUID) -> None:
            fields = {"topic": deleted[topic_id], "id": str(topic_id)}
            try:
                if self._deletions.is_tiered(topic_id) or self._deletions.topic_tier_config(topic_id):
                    await self._deletions.put_topic_deletion(topic_id, deleted[topic_id])
                    logger.info("the deletion of a tiered topic is recorded", extra=fields)
            except RemoteLogError as error:
                logger.warning(_NOT_RECORDED, extra={**fields, "error": str(error)})
            except asyncio.CancelledError:
                logger.warning(_NOT_RECORDED, extra={**fields, "error": "the proxy is stopping"})
                raise
            except Exception:  # a defect may fail this record, but must not end the server's task group
                logger.exception(_NOT_RECORDED, extra=fields)

        async for part in slices_of(list(deleted)):
            await bounded_gather(part, record, _AT_ONCE)


class _State:
    __slots__ = ("_handler", "guarded", "known", "version")

    def __init__(self, handler: DeleteTopicsHandler, version: int) -> None:
        self._handler = handler
        self.version = version
        self.guarded: HandlerState | None = None
        self.known: Mapping[str, UUID | None] = {}
        """The ids that the topic names had before the request was forwarded."""

    def on_response(self, response: memoryview) -> Coroutine[None, None, Buffers]:
        return self._complete(response)

    def _deleted(self, response: memoryview) -> Steps[Mapping[UUID, str]]:
        deleted: dict[UUID, str] = {}
        for topic in (yield from deleted_topics.steps(response, self.version)):
            yield
            topic_id = topic.topic_id or self.known.get(topic.name or "")
            if topic_id is not None:
                deleted[topic_id] = topic.name or ""
        return deleted

    async def _complete(self, response: memoryview) -> Buffers:
        deleted = await in_turns(self._deleted(response))
        if deleted:
            await self._handler.record(deleted)
        if self.guarded is None:
            return (response,)
        answer = self.guarded.on_response(response)
        return await answer if isinstance(answer, Coroutine) else answer

    def on_abandoned(self) -> None:
        return


def _metadata_request(names: Sequence[str], correlation_id: int) -> Steps[bytes]:
    """Returns a request that creates no topic, and asks for no rights."""
    topics = []
    for name in names:
        topics.append(_NO_ID + write_string(name, compact=True) + EMPTY_TAGGED_SECTION)
        yield
    header = build_request_header(ApiKey.METADATA, _METADATA_VERSION, correlation_id, "tidegate")
    return b"".join((header, write_array_length(len(names), compact=True), *topics, bytes(2), EMPTY_TAGGED_SECTION))


def _topic_ids(payload: memoryview) -> Steps[Mapping[str, UUID]]:
    body = payload[response_body_position(ApiKey.METADATA, _METADATA_VERSION, payload) :]
    ids: dict[str, UUID] = {}
    for topic in MetadataReader(body, _METADATA_VERSION).read(_SLICE_BYTES):
        if topic is not None and topic.name is not None and topic.error == ErrorCode.NONE:
            ids[topic.name] = topic.topic_id
        yield
    return ids
