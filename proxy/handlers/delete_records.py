"""Handles DeleteRecords: deletes in the remote tier too, before the proxy answers the client (docs/semantics.md 9.1).

Before the proxy forwards a deletion, the leader must confirm that its log continues the copied log. A leader whose
broker was emptied has another history. Once its log begins behind the copied records, a log start of that leader says
nothing about those records, and it would delete records that exist nowhere else. In that case the proxy refuses the
deletion with POLICY_VIOLATION, as a broker does for a topic whose records may not be deleted. While the leader's answer
is unknown, the proxy refuses with a retriable error. The proxy forwards a refused partition too, with an offset that
every broker rejects, because the broker decides whether the client may know anything about the partition.

The proxy asks the leader with its own rights, so the broker must have allowed the client to delete first. The proxy
sends the request with such offsets alone on the client's connection before. It checks the partitions for which the
broker finds fault with the offset and with nothing else. The other partitions stay refused, with the broker's errors.

The broker decides whether the client may delete. When the broker answers NONE, the proxy records the tier's log start,
and every proxy stops serving the records below it. The owner removes the segments later. An answer without an error
means that no deleted record can reappear. If the proxy cannot record the log start, it tells the client to try again.
If the client disconnects meanwhile, the proxy still records the log start, because the broker has deleted already.

The request has topic names, and a topic may be recreated under its name meanwhile. Therefore the proxy asks for the
topic's id after the broker has answered. It then asks the leader of that id whether its log begins where the broker
said.

The proxy records the log start with the leader epoch of the leader's answer. That leader's log begins at or above the
offset, so the leader has no record below the offset that a deletion could lose. A later leader that continues this
history has reached the offset by the end of that epoch, so it confirms the log start. A leader of another history
disproves it, and the owner ends it. If an earlier leader deleted the records, then its successor has the deletion too.

A leader that was cut off may reach the offset with records that were never committed. Therefore the log start also has
the leader epoch of the last deleted record. If that record is not remote, the proxy asks the leader for its epoch
before it forwards the deletion, because the leader forgets the epochs below its log start. If the leader changes
meanwhile, the epoch is unknown.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple
from uuid import UUID

from protocol.api_keys import ApiKey, check_version
from protocol.apis.delete_records import (
    HIGH_WATERMARK,
    DeleteRecordsAnswer,
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsResponse,
    DeleteRecordsResponsePartition,
    parse_delete_records_request,
    parse_delete_records_response,
    patch_delete_records_response,
    with_refused_partitions,
)
from protocol.apis.named_topics import Refusal, Replaced, with_refusals, without_topics
from protocol.errors import ErrorCode
from protocol.header import parse_request_header, response_body_position
from protocol.primitives import Buffer
from protocol.steps import Steps
from proxy.handlers.base import NOT_KNOWN_NOW, ClusterTopology, HandlerTools
from proxy.handlers.turns import in_slices, in_turns, slices_of
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Prepare, Respond
from tiers.errors import LogDivergedError, NotKnownNow, RemoteLogError
from tiers.metadata.changes import MetadataChanges
from tiers.metadata.log_history import epoch_before
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import UNKNOWN_EPOCH, LogStart, LogStartReason

logger = logging.getLogger(__name__)

_NOT_RECORDED = "the broker deleted records, but the new log start was not recorded: the client must try again"

_DIVERGED = (
    "nothing was deleted: the leader's log has another history than the copied log; see the alarm 'diverged' and"
    " `tidegate tier cut` (docs/recovery.md, 'A partition stops')"
)
_UNCERTAIN = "nothing was deleted: it is unknown whether the leader's log continues the copied log; the client retries"
_CHECK_TIMEOUT_MS = 10_000
"""The deadline is short, because later requests of the connection wait during the check."""
_OWN_TOPIC = Refusal(ErrorCode.TOPIC_AUTHORIZATION_FAILED, "")
_LATER = NOT_KNOWN_NOW[ApiKey.DELETE_RECORDS]
_FAILED = DeleteRecordsAnswer(error_code=_LATER)
"""The answer if the broker deleted the records, but the tier's log start could not be recorded."""
_OUR_REFUSAL = (ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE)
"""The broker's answers for a refused partition, if the client may delete the partition's records."""

_MIN_TIMEOUT_MS = 5_000
"""The broker has deleted already. A shorter timeout of the client must not leave the two tiers different."""

_MAX_TIMEOUT_MS = 60_000


CheckHistory = Callable[[TopicIdPartition, LocalLogBounds, int], Awaitable[None]]
"""`require_aligned`, bound to a log source and the metadata.

The arguments are a partition, its leader's bounds, and a timeout (ms)."""


class DeleteRecordsHandler:
    """Implements `Handler`."""

    def __init__(
        self,
        tools: HandlerTools,
        changes: MetadataChanges,
        check_history: CheckHistory,
        own_topics: Collection[str] = (),
    ) -> None:
        """`own_topics` are the topics of the remote log itself. Clients may not delete their records."""
        self._tools = tools
        self._changes = changes
        self._check_history = check_history
        self._own_topics = own_topics

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        request = exchange.request
        check_version(ApiKey.DELETE_RECORDS, request.api_version)
        state = _State(request.api_version, exchange.node_id)
        return Prepare(lambda: self._prepare(state, exchange)), partial(self.complete, state)

    def _read(self, frame: bytes, version: int) -> Steps[_Read]:
        """Decodes the request. Raises `ProtocolError`."""
        body_position = parse_request_header(frame).body_position
        request = yield from parse_delete_records_request.steps(frame, body_position, version)
        kept, replaced = yield from without_topics.steps(
            frame, ApiKey.DELETE_RECORDS, version, lambda topic: _OWN_TOPIC if topic.name in self._own_topics else None
        )
        # A replaced name has another length, so the frame is parsed again for the new positions.
        sent = request.partitions
        if replaced:
            sent = (yield from parse_delete_records_request.steps(kept, body_position, version)).partitions
        asked = [one for one in sent if one.topic not in replaced]
        refused = yield from with_refused_partitions.steps(kept, sent)
        return _Read(request, replaced, kept, asked, refused)

    async def _prepare(self, state: _State, exchange: Exchange) -> Forward:
        whole = exchange.request.frame
        read = await in_turns(self._read(whole, state.version))
        state.request, state.replaced = read.request, read.replaced
        timeout_ms = min(max(read.request.timeout_ms, _MIN_TIMEOUT_MS), _CHECK_TIMEOUT_MS)
        denied = await self._denied(exchange, read.refused_frame)
        checked: list[DeleteRecordsPartition] = []
        async for part in slices_of(read.asked):
            for one in part:
                code = denied.get((one.topic, one.partition), _LATER)
                if code is None:
                    checked.append(one)
                else:
                    state.refused[one.topic, one.partition] = code
        topics = _CurrentTopics(self._tools.topology, {one.topic for one in checked}, state.node_id)
        found = await in_slices(checked, lambda one: self._refusal(state, one, topics, timeout_ms), timeout_ms)
        unchecked = [_LATER] * (len(checked) - len(found))
        for one, code in zip(checked, [*found, *unchecked], strict=True):
            if code is not None:
                state.refused[one.topic, one.partition] = code
        if not state.refused:
            return Forward(read.frame, hold_bytes=None)
        frame = await in_turns(_without(read.frame, read.asked, state.refused))
        return Forward(frame, hold_bytes=None)

    async def _denied(self, exchange: Exchange, frame: bytes) -> Mapping[tuple[str, int], int | None]:
        """Returns the broker's error for each partition whose records the client may not delete now.

        None: the broker finds fault with the offset alone. `frame` has an offset that every broker rejects."""
        asked = exchange.try_forward(frame)
        if asked is None:  # the connection to the broker is gone
            return {}
        payload, version = await asked, exchange.request.api_version
        denied: dict[tuple[str, int], int | None] = {}
        async for part in slices_of((await in_turns(_parsed_response(payload, version))).partitions):
            for one in part:
                is_fit = one.error_code == ErrorCode.OFFSET_OUT_OF_RANGE
                denied[one.topic, one.partition] = None if is_fit else one.error_code or _LATER
        return denied

    async def _refusal(
        self, state: _State, asked: DeleteRecordsPartition, topics: _CurrentTopics, timeout_ms: int
    ) -> ErrorCode | None:
        """Returns the error for a partition whose records may not be deleted now. None: the broker may delete them."""
        fields = {"topic": asked.topic, "partition": asked.partition}
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                last_record = await self._check(asked, topics, timeout_ms)
        except LogDivergedError as error:
            logger.error(_DIVERGED, extra={**fields, "error": str(error)})
            return ErrorCode.POLICY_VIOLATION
        except (TimeoutError, RemoteLogError) as error:
            logger.warning(_UNCERTAIN, extra={**fields, "error": str(error) or f"no answer within {timeout_ms} ms"})
            return _LATER
        except Exception:  # a defect may fail this partition, but must not close the client's connection
            logger.exception(_UNCERTAIN, extra=fields)
            return _LATER
        if last_record is not None:
            state.last_records[asked.topic, asked.partition] = last_record
        return None

    async def _check(
        self, asked: DeleteRecordsPartition, topics: _CurrentTopics, timeout_ms: int
    ) -> _LastRecord | None:
        """Returns the last record to delete, if the leader alone has it.

        Raises `LogDivergedError`, or another `RemoteLogError` when the answer is unknown."""
        tools = self._tools
        topic_id = await topics.topic_id(asked.topic, timeout_ms)
        if topic_id is None:
            return None  # the broker answers that the topic does not exist
        partition = TopicIdPartition(topic_id, asked.partition, asked.topic)
        reading = await tools.log.ensure_fresh(partition, timeout_ms, max_age_ms=0)
        is_known = tools.log.is_tiered(partition)
        if not is_known and not await tools.configured.is_tiered(topic_id, timeout_ms):
            return None
        # The broker refuses a partition without a leader, so the check must not wait long for one.
        timeout_ms = min(timeout_ms, tools.settings.bounds_timeout_ms)
        bounds = (await tools.bounds.ask(partition, tools.clock_ms() + 1, timeout_ms)).bounds
        if is_known:
            await self._check_history(partition, bounds, timeout_ms)
            tools.log.require_fresh(partition, reading)
        elif bounds.log_start_offset > 0:
            raise NotKnownNow(f"the metadata does not know {partition} yet")
        offset = bounds.high_watermark if asked.offset == HIGH_WATERMARK else asked.offset
        is_local = bounds.log_start_offset < offset <= bounds.high_watermark
        if not is_local or tools.log.remote(partition).epoch_at(offset - 1) != UNKNOWN_EPOCH:
            return None
        epoch = await epoch_before(tools.source, partition, offset, bounds.leader_epoch, timeout_ms)
        if epoch != bounds.leader_epoch:
            # The leader forgets the epochs below its log start, which may have passed the record meanwhile.
            now = (await tools.bounds.ask(partition, tools.clock_ms() + 1, timeout_ms)).bounds
            if now.log_start_offset >= offset:
                return None
        return _LastRecord(partition, offset, epoch, bounds.leader_epoch)

    async def complete(self, state: _State, payload: memoryview) -> Buffers:
        request = state.request
        deleted = await in_turns(_deleted(state, payload))
        timeout_ms = min(max(request.timeout_ms, _MIN_TIMEOUT_MS), _MAX_TIMEOUT_MS)
        topics = _CurrentTopics(self._tools.topology, {one.asked.topic for one in deleted.partitions}, state.node_id)
        answers = {one.place: _FAILED for one in deleted.partitions}

        async def answer(one: _DeletedPartition) -> None:
            found = await self._answer(state, one, topics, timeout_ms)
            if found is None:
                del answers[one.place]
            else:
                answers[one.place] = found

        async def answer_all() -> None:
            tried = await in_slices(deleted.partitions, answer, timeout_ms)
            if len(tried) < len(deleted.partitions):
                logger.warning(_NOT_RECORDED, extra={"partitions": len(deleted.partitions) - len(tried)})

        if answers:
            await asyncio.wait((self._tools.spawn(answer_all()),))
        return (await in_turns(_patched(state, deleted.response, answers)),)

    async def _answer(
        self, state: _State, deleted: _DeletedPartition, topics: _CurrentTopics, timeout_ms: int
    ) -> DeleteRecordsAnswer | None:
        """Returns the answer for one partition. None: the proxy relays the broker's answer."""
        asked = deleted.asked
        last_record = state.last_records.get((asked.topic, asked.partition))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._delete(asked, deleted.broker, last_record, topics, timeout_ms)
        except (TimeoutError, RemoteLogError) as error:
            reason = str(error) or f"no answer within {timeout_ms} ms"
            logger.warning(_NOT_RECORDED, extra={"topic": asked.topic, "partition": asked.partition, "error": reason})
        except Exception:  # a defect may fail this partition, but must not end the server's task group
            logger.exception(_NOT_RECORDED, extra={"topic": asked.topic, "partition": asked.partition})
        return _FAILED

    async def _delete(
        self,
        asked: DeleteRecordsPartition,
        broker: DeleteRecordsResponsePartition,
        last_record: _LastRecord | None,
        topics: _CurrentTopics,
        timeout_ms: int,
    ) -> DeleteRecordsAnswer | None:
        tools = self._tools
        deadline_ms = tools.clock_ms() + timeout_ms
        topic_id = await topics.topic_id(asked.topic, timeout_ms)
        if topic_id is None:
            raise NotKnownNow(f"the topic {asked.topic} does not exist any more")
        partition = TopicIdPartition(topic_id, asked.partition, asked.topic)
        # The metadata is read to its current end, because a copy that has just begun must not restore deleted records.
        reading = await tools.log.ensure_fresh(partition, timeout_ms, max_age_ms=0)
        if not tools.log.is_tiered(partition):
            return None
        offset = broker.low_watermark if asked.offset == HIGH_WATERMARK else asked.offset
        # The question is one millisecond later: a question of the same millisecond may be older than the deletion.
        bounds = (await tools.bounds.ask(partition, tools.clock_ms() + 1, timeout_ms)).bounds
        if bounds.log_start_offset < max(offset, broker.low_watermark):
            raise NotKnownNow(f"{asked.topic} was recreated after its records were deleted")
        if offset > 0:
            tools.log.require_fresh(partition, reading)
            last_epoch = tools.log.remote(partition).epoch_at(offset - 1)
            if last_epoch == UNKNOWN_EPOCH and last_record is not None:
                last_epoch = last_record.epoch_below(partition, offset, bounds.leader_epoch)
            start = LogStart(offset, bounds.leader_epoch, LogStartReason.USER, last_epoch)
            # The write may take the rest of the client's timeout: the open transaction of a dead owner delays it.
            left_ms = deadline_ms - tools.clock_ms()
            await self._changes.put_log_start(partition, start, left_ms)
        log_start = tools.log.remote(partition).earliest(broker.low_watermark)
        return DeleteRecordsAnswer(log_start) if log_start is not None and log_start < broker.low_watermark else None


class _LastRecord(NamedTuple):
    """The last record that a deletion to `offset` deletes: its leader epoch, by the leader of `leader_epoch`."""

    partition: TopicIdPartition
    offset: int
    epoch: int
    leader_epoch: int

    def epoch_below(self, partition: TopicIdPartition, offset: int, leader_epoch: int) -> int:
        """Returns the epoch of the record before `offset`, if the same leader still leads the same partition.

        A deletion up to the high watermark may have deleted later records, too. They have the leader's epoch. That is
        known only if this record has it."""
        is_same = (self.partition, self.leader_epoch) == (partition, leader_epoch)
        is_named = offset == self.offset or (offset > self.offset and self.epoch == leader_epoch)
        return self.epoch if is_same and is_named else UNKNOWN_EPOCH


class _CurrentTopics:
    """Looks up the ids of a request's topics, with one question to the broker."""

    def __init__(self, topology: ClusterTopology, names: Collection[str], node_id: int | None) -> None:
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


def _parsed_response(payload: memoryview, version: int) -> Steps[DeleteRecordsResponse]:
    body_position = response_body_position(ApiKey.DELETE_RECORDS, version, payload)
    return parse_delete_records_response.steps(payload, body_position, version)


def _without(
    frame: bytes, asked: Sequence[DeleteRecordsPartition], refused: Collection[tuple[str, int]]
) -> Steps[bytes]:
    """Returns the request that deletes nothing of the partitions in `refused`."""
    return with_refused_partitions.steps(frame, [one for one in asked if (one.topic, one.partition) in refused])


class _Read(NamedTuple):
    """A decoded request."""

    request: DeleteRecordsRequest
    replaced: Mapping[str, Replaced]
    frame: bytes
    """The request with replacement names for our own topics."""
    asked: Sequence[DeleteRecordsPartition]
    """The partitions of other topics, with their positions in `frame`."""
    refused_frame: bytes
    """The request that asks for offsets which every broker rejects."""


class _DeletedPartition(NamedTuple):
    place: int
    """The index of `broker` in the response."""
    asked: DeleteRecordsPartition
    broker: DeleteRecordsResponsePartition


class _Deleted(NamedTuple):
    """A decoded response, and the partitions whose records the broker has deleted."""

    response: DeleteRecordsResponse
    partitions: Sequence[_DeletedPartition]


def _deleted(state: _State, payload: memoryview) -> Steps[_Deleted]:
    """Raises `ProtocolError`."""
    response = yield from _parsed_response(payload, state.version)
    asked: dict[tuple[str, int], DeleteRecordsPartition] = {}
    for each in state.request.partitions:
        asked[each.topic, each.partition] = each
        yield
    partitions = []
    for place, one in enumerate(response.partitions):
        key = one.topic, one.partition
        if not one.error_code and key in asked and key not in state.refused:
            partitions.append(_DeletedPartition(place, asked[key], one))
        yield
    return _Deleted(response, partitions)


def _patched(state: _State, response: DeleteRecordsResponse, found: Mapping[int, DeleteRecordsAnswer]) -> Steps[Buffer]:
    """Returns the response with the answers that were found, and with the refusals."""
    answers = dict(found)
    for index, one in enumerate(response.partitions):
        code = state.refused.get((one.topic, one.partition))
        if code is not None and one.error_code in _OUR_REFUSAL:
            answers[index] = DeleteRecordsAnswer(error_code=code)
        if one.topic in state.replaced:
            answers[index] = DeleteRecordsAnswer(error_code=_OWN_TOPIC.code)
        yield
    if not answers:
        return response.payload
    patched = yield from patch_delete_records_response.steps(response, answers)
    if not state.replaced:
        return patched
    return (yield from with_refusals.steps(memoryview(patched), ApiKey.DELETE_RECORDS, state.version, state.replaced))


@dataclass(slots=True)
class _State:
    version: int
    node_id: int | None
    request: DeleteRecordsRequest = field(init=False)
    replaced: Mapping[str, Replaced] = field(default_factory=dict)
    refused: dict[tuple[str, int], int] = field(default_factory=dict)
    """The error code for each partition whose records the proxy does not let the broker delete."""
    last_records: dict[tuple[str, int], _LastRecord] = field(default_factory=dict)
    """The last record to delete of each partition whose records the broker may delete."""
