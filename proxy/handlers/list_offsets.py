"""Handles ListOffsets: the broker answers first, then offsets of the remote tier take precedence (docs/semantics.md 5).

EARLIEST is the tier's log start. The broker alone answers LATEST and EARLIEST_LOCAL. LATEST_TIERED is the remote end.
EARLIEST_PENDING_UPLOAD, and NEXT_LOCAL_TIMESTAMP below version 7, is the offset from which the local log has to be
read. A broker refuses NEXT_LOCAL_TIMESTAMP, so the proxy asks it for EARLIEST instead: the broker then checks the
client's rights, the leader and the leader epoch. For a timestamp, the proxy searches the remote records below the
broker's answer.

The proxy answers with an error that clients retry if it cannot complete a look-up, if its metadata is not fresh
(docs/design.md, safety rule 1), or if the metadata does not know a partition of a topic that the configuration tiers.
It never answers with the local tier's later offset instead. Two answers of the broker need no metadata: those for an
internal topic, which no setting tiers, and offset 0, before which no record of a log lies. After the broker's answer,
the proxy asks the broker for the topic id of each tiered topic's name: the remote tier of a deleted topic must not
answer for a recreated one (docs/semantics.md 9.3).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from uuid import UUID

from protocol.api_keys import ApiKey, check_version
from protocol.apis.list_offsets import (
    EARLIEST_LOCAL_TIMESTAMP,
    EARLIEST_TIMESTAMP,
    LATEST_TIERED_TIMESTAMP,
    LATEST_TIMESTAMP,
    MAX_TIMESTAMP,
    NEXT_LOCAL_TIMESTAMP,
    ListOffsetsAnswer,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsResponsePartition,
    parse_list_offsets_request,
    parse_list_offsets_response,
    patch_list_offsets_response,
    with_timestamp,
)
from protocol.errors import CorruptBatchError, ErrorCode
from protocol.header import parse_request_header, response_body_position
from protocol.steps import Steps
from proxy.handlers.base import NOT_KNOWN_NOW, HandlerTools, current_partition
from proxy.handlers.turns import Decision, decide_in_turns, in_slices, in_turns, slices_of
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Prepare, Respond
from tiers.config.topic_policy import is_internal
from tiers.errors import NotKnownNow, RemoteLogError
from tiers.model.ids import TopicIdPartition
from tiers.reader.chunk_fetcher import Caller
from tiers.reader.remote_log_offset_reader import TimestampOffset
from tiers.two_tier_log import BEYOND_ALL

logger = logging.getLogger(__name__)

_BROKERS_OWN = (LATEST_TIMESTAMP, EARLIEST_LOCAL_TIMESTAMP)
_UNAVAILABLE = ListOffsetsAnswer(NOT_KNOWN_NOW[ApiKey.LIST_OFFSETS])


class ListOffsetsHandler:
    """Implements `Handler`."""

    def __init__(self, tools: HandlerTools) -> None:
        self._tools = tools

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        version = exchange.request.api_version
        check_version(ApiKey.LIST_OFFSETS, version)

        return decide_in_turns(self._decided(exchange, version))

    def _decided(self, exchange: Exchange, version: int) -> Steps[Decision]:
        frame = exchange.request.frame
        body_position = parse_request_header(frame).body_position
        parsed = yield from parse_list_offsets_request.steps(frame, body_position, version)
        if parsed.replica_id >= 0 or all(asked.timestamp in _BROKERS_OWN for asked in parsed.partitions):
            return Forward(frame), None
        if refused := (yield from self._refused_by_the_broker(parsed)):
            frame = bytes((yield from with_timestamp(frame, refused, EARLIEST_TIMESTAMP)))
        return Forward(frame, hold_bytes=None), partial(self.complete, exchange, parsed)

    def _refused_by_the_broker(self, request: ListOffsetsRequest) -> Steps[list[ListOffsetsPartition]]:
        """Returns the partitions of topics that may be tiered, at which the request asks for NEXT_LOCAL_TIMESTAMP.

        A topic that was created a moment ago is still unknown here. `complete` learns whether it is tiered."""
        if request.has_max_timestamp:
            return []
        refused = []
        may_be_tiered: dict[str, bool] = {}
        for asked in request.partitions:
            yield
            if asked.timestamp != NEXT_LOCAL_TIMESTAMP:
                continue
            if asked.topic not in may_be_tiered:
                may_be_tiered[asked.topic] = self._may_be_tiered(asked.topic)
            if may_be_tiered[asked.topic]:
                refused.append(asked)
        return refused

    def _is_unknown(self, topic: str) -> bool:
        return self._tools.topology.topic_id(topic) is None

    @staticmethod
    def _was_replaced(request: ListOffsetsRequest, asked: ListOffsetsPartition) -> bool:
        """Whether the broker was asked for EARLIEST in place of NEXT_LOCAL_TIMESTAMP, which it refuses."""
        return asked.timestamp == NEXT_LOCAL_TIMESTAMP and not request.has_max_timestamp

    def _brokers_own(self, request: ListOffsetsRequest, asked: ListOffsetsPartition) -> ListOffsetsAnswer | None:
        """Returns the broker's answer to the question itself: None, or an error if another question was sent."""
        is_replaced = self._was_replaced(request, asked)
        return ListOffsetsAnswer(ErrorCode.UNSUPPORTED_VERSION) if is_replaced else None

    async def complete(self, exchange: Exchange, request: ListOffsetsRequest, payload: memoryview) -> Buffers:
        body_position = response_body_position(ApiKey.LIST_OFFSETS, request.version, payload)
        response = await in_turns(parse_list_offsets_response.steps(payload, body_position, request.version))
        asked: dict[tuple[str, int], ListOffsetsPartition] = {}
        async for part in slices_of(request.partitions):
            asked.update(((one.topic, one.partition), one) for one in part)
        timeout_ms = self._tools.settings.list_offsets_timeout_ms
        if request.timeout_ms > 0:
            timeout_ms = min(timeout_ms, request.timeout_ms)
        deadline_ms = exchange.request.received_at_ms + timeout_ms
        topic_ids = await self._current_ids(response.partitions, exchange.node_id, deadline_ms)
        found = await in_slices(
            response.partitions,
            lambda one: self._answer(
                request,
                asked.get((one.topic, one.partition)),
                one,
                topic_ids,
                deadline_ms,
                exchange.connection_id,
            ),
            deadline_ms - self._tools.clock_ms(),
        )
        answers = {index: answer for index, answer in enumerate(found) if answer is not None}
        async for indexes in slices_of(range(len(found), len(response.partitions))):
            for index in indexes:
                one = response.partitions[index]
                late = self._late(request, asked.get((one.topic, one.partition)), one)
                if late is not None:
                    answers[index] = late
        if not answers:
            return (payload,)
        return (await in_turns(patch_list_offsets_response.steps(response, answers)),)

    def _late(
        self, request: ListOffsetsRequest, asked: ListOffsetsPartition | None, broker: ListOffsetsResponsePartition
    ) -> ListOffsetsAnswer | None:
        """Returns the answer for a partition without time for a look-up. None: the broker's own answer is true."""
        if asked is None or asked.timestamp in _BROKERS_OWN or broker.error_code:
            return None
        return self._brokers_own(request, asked) if is_internal(asked.topic) else _UNAVAILABLE

    async def _current_ids(
        self, answers: Sequence[ListOffsetsResponsePartition], node_id: int | None, deadline_ms: int
    ) -> Mapping[str, UUID | None]:
        """Returns the topic ids that the tiered topics' names had when the broker answered. None: the id is unknown.

        A missing name was not tiered a short time ago. Such a topic can be a new one, and a new topic is not trimmed
        yet. The broker is also asked for the names that the proxy has not met yet."""
        tools = self._tools
        answered = {answer.topic for answer in answers if not answer.error_code}
        names: set[str] = set()
        async for part in slices_of(list(answered)):
            for name in part:
                tools.topology.use_topic(name)
                if self._may_be_tiered(name):
                    names.add(name)
        timeout_ms = max(1, min(tools.settings.metadata_timeout_ms, deadline_ms - tools.clock_ms()))
        try:
            topic_ids = await tools.topology.current_topic_ids(names, node_id, timeout_ms)
        except RemoteLogError:
            topic_ids = {}
        return {name: topic_ids.get(name) for name in names}

    def _may_be_tiered(self, topic: str) -> bool:
        """Whether the topic may be tiered. True too while it is unknown here."""
        if is_internal(topic):
            return False
        topic_id = self._tools.topology.topic_id(topic)
        if topic_id is None:
            return True
        try:
            return self._tools.metadata.state.is_tiered(topic_id) or self._tools.configured.may_be_tiered(topic_id)
        except RemoteLogError:
            return True

    async def _partition(self, topic: str, index: int, topic_ids: Mapping[str, UUID | None]) -> TopicIdPartition | None:
        if topic not in topic_ids:
            return await current_partition(self._tools, topic, index)
        topic_id = topic_ids[topic]
        return None if topic_id is None else TopicIdPartition(topic_id, index, topic)

    async def _answer(
        self,
        request: ListOffsetsRequest,
        asked: ListOffsetsPartition | None,
        broker: ListOffsetsResponsePartition,
        topic_ids: Mapping[str, UUID | None],
        deadline_ms: int,
        connection_id: int,
    ) -> ListOffsetsAnswer | None:
        """Returns the answer for one partition. None: the proxy relays the broker's answer."""
        if asked is None or asked.timestamp in _BROKERS_OWN:
            return None
        tools = self._tools
        if broker.error_code:
            is_no_topic = broker.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and self._is_unknown(asked.topic)
            is_not_tiered = is_no_topic and not tools.configured.has_rule_for(asked.topic)
            return self._brokers_own(request, asked) if is_not_tiered else None
        if is_internal(asked.topic):
            return self._brokers_own(request, asked)
        partition = await self._partition(asked.topic, asked.partition, topic_ids)
        remaining_ms = max(1, deadline_ms - tools.clock_ms())
        timeout_ms = min(tools.settings.metadata_timeout_ms, remaining_ms)
        if partition is None:
            return _UNAVAILABLE
        is_offset_zero = broker.offset == 0 and (asked.timestamp == EARLIEST_TIMESTAMP or asked.timestamp >= 0)
        if is_offset_zero and not tools.log.is_known(partition):
            return None
        try:
            reading = await tools.log.ensure_fresh(partition, timeout_ms)
            if not tools.log.is_tiered(partition):
                return await self._of_unknown(request, asked, partition, timeout_ms)
            answer = await self._of_tiered(request, asked, broker, partition, deadline_ms, connection_id)
            tools.log.require_fresh(partition, reading)
        except RemoteLogError:
            return _UNAVAILABLE
        except CorruptBatchError as error:
            logger.warning(
                "the look-up by timestamp failed, the client retries: %s", error, extra={"partition": str(partition)}
            )
            return _UNAVAILABLE
        return answer

    async def _of_tiered(
        self,
        request: ListOffsetsRequest,
        asked: ListOffsetsPartition,
        broker: ListOffsetsResponsePartition,
        partition: TopicIdPartition,
        deadline_ms: int,
        connection_id: int,
    ) -> ListOffsetsAnswer | None:
        """Answers for a partition that the metadata knows. Raises `RemoteLogError` and `CorruptBatchError`."""
        if asked.timestamp == EARLIEST_TIMESTAMP:
            return await self._earliest(partition, broker.offset)
        if asked.timestamp == LATEST_TIERED_TIMESTAMP:
            return self._latest_tiered(partition)
        if request.asks_next_local(asked.timestamp):
            return ListOffsetsAnswer(offset=await self._tools.log.next_local(partition))
        if asked.timestamp < 0 and asked.timestamp != MAX_TIMESTAMP:
            return None
        if self._tools.log.is_reading_paused(partition):
            raise NotKnownNow("the record may be remote, and its topic's reading is paused")
        if asked.timestamp == MAX_TIMESTAMP:
            return await self._max_timestamp(partition, broker, deadline_ms, connection_id)
        log_start = await self._tools.log.log_start(partition)
        found = await self._tools.reader.offset_for_timestamp(
            partition,
            asked.timestamp,
            log_start,
            broker.offset if broker.offset >= 0 else BEYOND_ALL,
            Caller(deadline_ms, connection_id),
        )
        await self._tools.log.require_no_hole(partition, log_start, broker.offset if found is None else found.offset)
        return None if found is None else _of_record(found)

    async def _of_unknown(
        self,
        request: ListOffsetsRequest,
        asked: ListOffsetsPartition,
        partition: TopicIdPartition,
        timeout_ms: int,
    ) -> ListOffsetsAnswer | None:
        """Answers for a partition that the metadata does not know. Raises `RemoteLogError`.

        If the configuration tiers the topic, remote records may lie below the local log. The broker's answer is then
        true only for a log that begins at offset 0."""
        tools, timestamp = self._tools, asked.timestamp
        if not await tools.configured.is_tiered(partition.topic_id, timeout_ms):
            return self._brokers_own(request, asked)
        if timestamp == EARLIEST_TIMESTAMP:
            return _UNAVAILABLE
        # The question goes to the leader after the broker's answer.
        verified = await tools.bounds.ask(partition, tools.clock_ms() + 1, tools.settings.bounds_timeout_ms)
        if verified.bounds.log_start_offset > 0:
            return _UNAVAILABLE
        return ListOffsetsAnswer(offset=0) if request.asks_next_local(timestamp) else None

    async def _earliest(self, partition: TopicIdPartition, local_log_start: int) -> ListOffsetsAnswer | None:
        offset = await self._tools.log.earliest(partition, local_log_start)
        if offset is None or offset == local_log_start:
            return None
        return ListOffsetsAnswer(offset=offset, leader_epoch=self._tools.log.remote(partition).epoch_at(offset))

    def _latest_tiered(self, partition: TopicIdPartition) -> ListOffsetsAnswer | None:
        remote = self._tools.log.remote(partition)
        end_offset = remote.end(remote.log_start())
        if end_offset is None:
            return None
        return ListOffsetsAnswer(offset=end_offset, leader_epoch=remote.epoch_at(end_offset))

    async def _max_timestamp(
        self,
        partition: TopicIdPartition,
        broker: ListOffsetsResponsePartition,
        deadline_ms: int,
        connection_id: int,
    ) -> ListOffsetsAnswer | None:
        """Returns the record with the largest timestamp. None: the proxy relays the broker's answer.

        If the timestamps are equal, the remote record wins, because its offset is lower. If the broker has records and
        names none of them, then its newest record lies at or above the bound of the isolation level. The answer for the
        whole log is then "no record" too (docs/semantics.md 5).
        """
        if broker.offset < 0:
            local = await self._tools.log.local(partition)
            if local.log_start_offset < local.high_watermark:
                return None
        log_start = await self._tools.log.log_start(partition)
        found = await self._tools.reader.max_timestamp(
            partition, log_start, BEYOND_ALL, Caller(deadline_ms, connection_id)
        )
        await self._tools.log.require_no_hole(partition, log_start, -1)
        if found is None or (broker.offset >= 0 and found.timestamp_ms < broker.timestamp):
            return None
        return _of_record(found)


def _of_record(found: TimestampOffset) -> ListOffsetsAnswer:
    return ListOffsetsAnswer(0, found.timestamp_ms, found.offset, found.leader_epoch)
