"""Handles DeleteTopics: records the topics that the brokers deleted, so that owners delete the remote data.

See docs/semantics.md 9.2.

If no broker knows a topic, that does not prove that the topic was deleted: a cluster whose KRaft log was restored from
a copy lacks topics as well. The answer to DeleteTopics is the proof, and only a proxy sees it. The proxy records the
topic's id in the metadata. The owners delete the segments later, if every broker calls that id unknown.

Answers below version 6 have only names. Therefore the proxy asks for the ids of the names before it forwards the
request. After an answer without an error that id is deleted, by this request or by an earlier one. If the cluster does
not answer the question, the proxy uses the ids that the cluster told last. The same argument holds for those ids.

The client gets the broker's answer in any case, and waits for the record for a few seconds at most. If the record is
missing, the owners delete the remote data after days, or when an operator says that the topic was deleted
(`tiers/tasks/deletion/missing_topics.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from typing import Protocol
from uuid import UUID

from protocol.apis.named_topics import deleted_topics, named_topics
from proxy.handlers.base import ClusterTopology, Spawn
from proxy.handlers.metadata_topic_guard import MetadataTopicGuard
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, HandlerState, Prepare
from tiers.bounded_gather import bounded_gather
from tiers.errors import BrokerError, RemoteLogError

logger = logging.getLogger(__name__)

_ANSWERED_BY_ID = 6
_LOOK_UP_TIMEOUT_MS = 2_000
_MAX_WAIT_MS = 5_000
"""The longest time that a client waits for the records of its topics. The proxy continues to write them after that."""
_AT_ONCE = 16
_NOT_RECORDED = (
    "a topic was deleted, but the record of the deletion may be missing: if the topic is tiered, its remote data is"
    " deleted after remote.log.topic.deletion.unproved.delay.ms, or by `tidegate tier missing-topics forget`"
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
        forward, guarded = self._guard.on_request(exchange)
        version, node_id = exchange.request.api_version, exchange.node_id
        topics = [topic for topic in named_topics(exchange.request.frame) if not self._guard.keeps_away(topic)]
        names = [topic.name for topic in topics if topic.name is not None]
        known = {name: topic_id for name in names if (topic_id := self._topology.topic_id(name)) is not None}
        state = _State(self, version, guarded, known)
        if version >= _ANSWERED_BY_ID or not names:
            return Forward(forward.frame, hold_bytes=None), state

        async def prepare() -> Forward:
            known.update(await self._current_ids(names, node_id))
            return Forward(forward.frame, hold_bytes=None)

        return Prepare(prepare), state

    async def _current_ids(self, names: Sequence[str], node_id: int | None) -> Mapping[str, UUID]:
        try:
            return await self._topology.current_topic_ids(names, node_id, _LOOK_UP_TIMEOUT_MS)
        except BrokerError as error:
            logger.warning(
                "the broker did not tell the ids of the topics to delete: the proxy uses the ids that it knows",
                extra={"error": str(error)},
            )
            return {}

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

        await bounded_gather(list(deleted), record, _AT_ONCE)


class _State:
    __slots__ = ("_guarded", "_handler", "_known", "_version")

    def __init__(
        self, handler: DeleteTopicsHandler, version: int, guarded: HandlerState | None, known: Mapping[str, UUID]
    ) -> None:
        """`known` has the ids that the topic names had before the request was forwarded."""
        self._handler = handler
        self._version = version
        self._guarded = guarded
        self._known = known

    def on_response(self, response: memoryview) -> Buffers | Coroutine[None, None, Buffers]:
        deleted: dict[UUID, str] = {}
        for topic in deleted_topics(response, self._version):
            topic_id = topic.topic_id or self._known.get(topic.name or "")
            if topic_id is not None:
                deleted[topic_id] = topic.name or ""
        return self._complete(response, deleted)

    async def _complete(self, response: memoryview, deleted: Mapping[UUID, str]) -> Buffers:
        if deleted:
            await self._handler.record(deleted)
        if self._guarded is None:
            return (response,)
        answer = self._guarded.on_response(response)
        return await answer if isinstance(answer, Coroutine) else answer

    def on_abandoned(self) -> None:
        return
