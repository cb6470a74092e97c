"""Handles OffsetForLeaderEpoch: answers from the remote tier for epochs that the broker trimmed with its log.

See docs/semantics.md 6.2.

The broker's answer decides about access and fencing. If the remote epochs are unavailable, the proxy relays the
broker's answer. After a trim the broker answers that an old epoch ends where the local log starts, so a client never
concludes that its data was truncated. For the same reason, a leader epoch that may have written the lost records of a
gap ends where the gap ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from protocol.api_keys import ApiKey, check_version
from protocol.apis.offset_for_leader_epoch import (
    EpochAnswer,
    EpochEndOffsetPartition,
    EpochPartition,
    OffsetForLeaderEpochRequest,
    parse_offset_for_leader_epoch_request,
    parse_offset_for_leader_epoch_response,
    patch_offset_for_leader_epoch_response,
)
from protocol.header import parse_request_header, response_body_position
from protocol.steps import Steps
from proxy.handlers.base import HandlerTools, current_partition
from proxy.handlers.leader_epochs import contains, end_offset_for
from proxy.handlers.turns import Decision, decide_in_turns, in_slices, in_turns
from proxy.wire.exchange import Answer, Buffers, Exchange, Forward, Prepare, Respond
from tiers.errors import RemoteLogError
from tiers.reader.chunk_fetcher import Caller

_TIMEOUT_MS = 5_000
"""After this time, the proxy relays the broker's answers for the remaining partitions."""


class OffsetForLeaderEpochHandler:
    """Implements `Handler`."""

    def __init__(self, tools: HandlerTools) -> None:
        self._tools = tools

    def on_request(self, exchange: Exchange) -> tuple[Answer | Forward | Prepare, Respond | None]:
        version = exchange.request.api_version
        check_version(ApiKey.OFFSET_FOR_LEADER_EPOCH, version)

        return decide_in_turns(self._decided(exchange, version))

    def _decided(self, exchange: Exchange, version: int) -> Steps[Decision]:
        frame = exchange.request.frame
        body_position = parse_request_header(frame).body_position
        parsed = yield from parse_offset_for_leader_epoch_request.steps(frame, body_position, version)
        if parsed.replica_id >= 0:
            return Forward(frame), None
        return Forward(frame, hold_bytes=None), partial(self.complete, exchange, parsed)

    async def complete(self, exchange: Exchange, request: OffsetForLeaderEpochRequest, payload: memoryview) -> Buffers:
        body_position = response_body_position(ApiKey.OFFSET_FOR_LEADER_EPOCH, request.version, payload)
        response = await in_turns(parse_offset_for_leader_epoch_response.steps(payload, body_position, request.version))
        asked = await in_turns(_asked_once(request))
        deadline_ms = exchange.request.received_at_ms + _TIMEOUT_MS
        found = await in_slices(
            response.partitions,
            lambda one: self._answer(asked.get((one.topic, one.partition)), one, deadline_ms, exchange.connection_id),
            deadline_ms - self._tools.clock_ms(),
        )
        answers = {index: answer for index, answer in enumerate(found) if answer is not None}
        if not answers:
            return (payload,)
        return (await in_turns(patch_offset_for_leader_epoch_response.steps(response, answers)),)

    async def _answer(
        self, asked: EpochPartition | None, broker: EpochEndOffsetPartition, deadline_ms: int, connection_id: int
    ) -> EpochAnswer | None:
        """Returns the answer for one partition. None: the proxy relays the broker's answer."""
        if asked is None or broker.error_code or asked.leader_epoch < 0:
            return None
        tools = self._tools
        partition = await current_partition(tools, asked.topic, asked.partition)
        if partition is None:
            return None
        try:
            await tools.log.ensure_fresh(partition, tools.settings.metadata_timeout_ms)
            remote = tools.log.remote(partition)
            last_remote_epoch = remote.last_epoch()
            if last_remote_epoch is None or asked.leader_epoch == last_remote_epoch:
                return None
            epochs = await tools.reader.leader_epochs(partition, Caller(deadline_ms, connection_id))
            if asked.leader_epoch < last_remote_epoch:
                found = end_offset_for(epochs, asked.leader_epoch, remote.gaps())
                return None if found is None else EpochAnswer(0, found.epoch, found.end_offset)
            if broker.leader_epoch != asked.leader_epoch or contains(epochs, asked.leader_epoch):
                return None
            if remote.has_gap_behind():
                return None
            local = await tools.log.local(partition)
        except RemoteLogError:
            return None
        if broker.end_offset > local.log_start_offset:
            return None
        # The epoch is older than all epochs that the broker still knows, and newer than all remote epochs. No record is
        # lost between them, so no record has this epoch.
        return EpochAnswer(0, last_remote_epoch, broker.end_offset)


def _asked_once(request: OffsetForLeaderEpochRequest) -> Steps[Mapping[tuple[str, int], EpochPartition]]:
    """If a request names a partition twice, the broker answers twice, and the proxy cannot match the answers."""
    asked: dict[tuple[str, int], EpochPartition] = {}
    twice: set[tuple[str, int]] = set()
    for one in request.partitions:
        key = one.topic, one.partition
        if key in asked:
            twice.add(key)
        asked[key] = one
        yield
    for key in twice:
        del asked[key]
        yield
    return asked
