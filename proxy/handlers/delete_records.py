"""DeleteRecords: what the broker deleted is deleted in the remote tier before the client hears of it (semantics 9.1).

The broker decides whether the client may delete. When the broker answers NONE, the proxy records the tier's log start,
and every proxy stops serving the records below it. The owner removes the segments later. An answer without an error
means that no deleted record can reappear. If the proxy cannot record the log start, it tells the client to try again. A
client that goes away meanwhile changes nothing: the broker has deleted already.

The request names topics, and a topic may be made again under its name meanwhile. So its id is asked for afterwards, and
the leader, by that id, whether its log does begin where the broker said.

The proxy records the log start with the leader epoch of the leader's answer. That leader's log begins at or above the
offset, so the leader has no record below the offset that a deletion could lose. A later leader that continues this
history has reached the offset by the end of that epoch, so it confirms the log start. A leader of another history does
not confirm it. If an earlier leader deleted the records, then its successor has the deletion too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Protocol
from uuid import UUID

from protocol.api_keys import ApiKey
from protocol.apis.delete_records import (
    HIGH_WATERMARK,
    DeleteRecordsAnswer,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponsePartition,
    parse_delete_records_request,
    parse_delete_records_response,
    patch_delete_records_response,
)
from protocol.apis.named_topics import Replaced, with_refusals, without_topics
from protocol.errors import ErrorCode
from protocol.header import parse_request_header, response_body_position
from proxy.error_map import delete_records_error
from proxy.exchange import Answer, Buffers, Exchange, Forward, HandlerState
from proxy.handlers.addresses import check_version
from proxy.handlers.base import HandlerTools, Topology
from tiers.errors import RemoteLogError, RemoteLogMetadataNotReadyError
from tiers.log.log_history import ConfirmedLogStart
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason

logger = logging.getLogger(__name__)

_NOT_RECORDED = "records were deleted on the broker, and the new log start was not recorded: the client is to try again"

_MIN_TIMEOUT_MS = 5_000
"""The broker's part is done: a client's shorter patience must not leave the tiers apart."""

_MAX_TIMEOUT_MS = 60_000


class LogStartRecorder(Protocol):
    """The one method of `RemoteLogMetadataManager` that needs no ownership."""

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        denied: Collection[LogStart] = (),
    ) -> None: ...


class DeleteRecordsHandler:
    """Implements `Handler`."""

    def __init__(self, tools: HandlerTools, recorder: LogStartRecorder, own_topics: Collection[str] = ()) -> None:
        """`own_topics` are the remote log's, not for clients to delete from."""
        self._tools = tools
        self._recorder = recorder
        self._own_topics = own_topics

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward, HandlerState | None]:
        request = exchange.request
        check_version(ApiKey.DELETE_RECORDS, request.api_version)
        body_position = parse_request_header(request.frame).body_position
        parsed = parse_delete_records_request(request.frame, body_position, request.api_version)
        frame, replaced = without_topics(
            request.frame, request.api_key, request.api_version, lambda topic: topic.name in self._own_topics
        )
        state = _State(self, parsed, replaced, exchange.node_id)
        return Forward(frame, hold_bytes=None), state

    async def complete(self, state: _State, payload: memoryview) -> Buffers:
        request, replaced = state.request, state.replaced
        body_position = response_body_position(ApiKey.DELETE_RECORDS, request.version, payload)
        response = parse_delete_records_response(payload, body_position, request.version)
        asked = {(one.topic, one.partition): one for one in request.partitions}
        timeout_ms = min(max(request.timeout_ms, _MIN_TIMEOUT_MS), _MAX_TIMEOUT_MS)
        answers: dict[int, DeleteRecordsAnswer] = {}
        topics = _CurrentTopics(self._tools.topology, {one.topic for one in request.partitions}, state.node_id)

        async def answer(index: int, one: DeleteRecordsResponsePartition) -> None:
            asked_for = asked.get((one.topic, one.partition))
            found = await self._answer(asked_for, one, topics, timeout_ms)
            if found is not None:
                answers[index] = found

        tasks = [self._tools.spawn(answer(index, one)) for index, one in enumerate(response.partitions)]
        if tasks:
            await asyncio.wait(tasks)
        for index, task in enumerate(tasks):
            if task.cancelled():
                answers[index] = _failed(RemoteLogMetadataNotReadyError("the proxy stops"))
        for index, one in enumerate(response.partitions):
            if one.topic in replaced:
                answers[index] = DeleteRecordsAnswer(error_code=ErrorCode.TOPIC_AUTHORIZATION_FAILED)
        if not answers:
            return (payload,)
        patched = patch_delete_records_response(response, answers)
        if not replaced:
            return (patched,)
        code = ErrorCode.TOPIC_AUTHORIZATION_FAILED
        return (with_refusals(memoryview(patched), ApiKey.DELETE_RECORDS, request.version, replaced, code, ""),)

    async def _answer(
        self,
        asked: DeleteRecordsPartition | None,
        broker: DeleteRecordsResponsePartition,
        topics: _CurrentTopics,
        timeout_ms: int,
    ) -> DeleteRecordsAnswer | None:
        """None relays the broker's answer."""
        if asked is None or broker.error_code:
            return None
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._delete(asked, broker, topics, timeout_ms)
        except (TimeoutError, RemoteLogError) as error:
            reason = str(error) or f"not in {timeout_ms} ms"
            logger.warning(_NOT_RECORDED, extra={"topic": asked.topic, "partition": asked.partition, "error": reason})
            return _failed(error if isinstance(error, RemoteLogError) else RemoteLogMetadataNotReadyError(reason))
        except Exception as error:  # a defect must cost this partition, not the server's task group
            logger.exception(_NOT_RECORDED, extra={"topic": asked.topic, "partition": asked.partition})
            return _failed(RemoteLogError(repr(error)))

    async def _delete(
        self,
        asked: DeleteRecordsPartition,
        broker: DeleteRecordsResponsePartition,
        topics: _CurrentTopics,
        timeout_ms: int,
    ) -> DeleteRecordsAnswer | None:
        tools = self._tools
        deadline_ms = tools.clock_ms() + timeout_ms
        topic_id = await topics.topic_id(asked.topic, timeout_ms)
        if topic_id is None:
            raise RemoteLogMetadataNotReadyError(f"{asked.topic} is not there any more")
        partition = TopicIdPartition(topic_id, asked.partition, asked.topic)
        # The metadata is read to its present end: a copy that just begins must not bring back deleted records.
        if not await tools.tiered.ensure_fresh(partition, timeout_ms, max_age_ms=0):
            raise RemoteLogMetadataNotReadyError(f"whether {asked.topic} is tiered is not known")
        if not tools.tiered.is_tiered(partition):
            return None
        offset = broker.low_watermark if asked.offset == HIGH_WATERMARK else asked.offset
        # One millisecond later: an answer to a question of the same millisecond may be older than the deletion.
        bounds = (await tools.bounds.ask(partition, tools.clock_ms() + 1, timeout_ms)).bounds
        if bounds.log_start_offset < max(offset, broker.low_watermark):
            raise RemoteLogMetadataNotReadyError(f"{asked.topic} is not the topic that records were deleted of")
        confirmed = await tools.log_starts.confirmed(partition, bounds.leader_epoch, timeout_ms)
        if offset > (confirmed.offset or 0):
            start = LogStart(offset, bounds.leader_epoch, LogStartReason.USER)
            # The write may take the rest of the client's timeout: a dead owner's open transaction holds it back long.
            left_ms = deadline_ms - tools.clock_ms()
            await self._recorder.put_log_start(partition, start, left_ms, confirmed.denied)
            confirmed = ConfirmedLogStart(offset)
        log_start = tools.tiered.earliest_readable(partition, broker.low_watermark, confirmed)
        return DeleteRecordsAnswer(log_start) if log_start is not None and log_start < broker.low_watermark else None


class _CurrentTopics:
    """The ids of a request's topics, asked for once."""

    def __init__(self, topology: Topology, names: Collection[str], node_id: int | None) -> None:
        self._topology = topology
        self._names = names
        self._node_id = node_id
        self._known: Mapping[str, UUID] | None = None
        self._asking = asyncio.Lock()

    async def topic_id(self, name: str, timeout_ms: int) -> UUID | None:
        """Raises `BrokerError`."""
        async with self._asking:
            if self._known is None:
                self._known = await self._topology.current_topic_ids(self._names, self._node_id, timeout_ms)
        return self._known.get(name)


def _failed(error: RemoteLogError) -> DeleteRecordsAnswer:
    return DeleteRecordsAnswer(error_code=delete_records_error(error))


@dataclass(frozen=True, slots=True)
class _State:
    handler: DeleteRecordsHandler
    request: DeleteRecordsRequest
    replaced: Mapping[str, Replaced]
    node_id: int | None

    def on_response(self, response: memoryview) -> Coroutine[None, None, Buffers]:
        return self.handler.complete(self, response)

    def on_abandoned(self) -> None:
        return
