"""Continues a read behind a gap that ends at the broker's own log, with a second Fetch for only those partitions.

The broker refused the offset that the client asked for, so the client may read the topic. The judge has checked that
the client's last record is the one before the gap. This module fetches from the broker's first offset, without a wait
and without a session. The broker's answer takes the place of its refusal. When no record is readable behind the gap,
the client gets one control batch that moves its position across the gap (`protocol/records/gap_batch.py`). Without that
batch, a client that waits for its position to reach the end would wait forever.

The client gets the same batch when the gap ends within a batch, in either tier. The first records of that batch lie in
the gap, and the client would return them: a client drops only the records below the offset that it requested.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from protocol.api_keys import ApiKey
from protocol.apis.fetch.request import FINAL_SESSION_EPOCH, NO_SESSION_ID, FetchPartition, patch_fetch_request
from protocol.apis.fetch.response import (
    LOG_START_OFFSET_AT,
    FetchResponse,
    FetchResponsePartition,
    parse_fetch_response,
)
from protocol.errors import ErrorCode, ProtocolError
from protocol.header import response_body_position
from protocol.primitives import INT64, Buffer
from protocol.records.gap_batch import gap_batch
from protocol.records.record_batch import iterate_batches
from proxy.cluster.local_log_bounds import Watermarks
from proxy.handlers.base import UNAVAILABLE, HandlerTools
from proxy.handlers.fetch.held import HeldFetch, PartitionKey, answer_by_ms
from proxy.handlers.fetch.local import LocalAnswers
from proxy.handlers.fetch.merge import LocalReplacement, RemoteOutcome
from proxy.handlers.fetch.verdict import Judgement, Verdict
from proxy.handlers.turns import SLICE_ITEMS, in_turns, slices_of
from proxy.wire.exchange import BrokerGoneError
from tiers.errors import RemoteLogError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH
from tiers.reader.remote_log_reader import RemoteRead

logger = logging.getLogger(__name__)


class BehindGaps:
    def __init__(self, tools: HandlerTools, local: LocalAnswers) -> None:
        self._tools = tools
        self._local = local

    async def ask(
        self, held: HeldFetch, response: FetchResponse, judgements: Mapping[int, Judgement]
    ) -> dict[int, RemoteOutcome]:
        """Fetches the partitions whose verdict is `LOCAL`. Returns their outcomes by index in `response`.

        If the broker does not answer in time, a partition has no outcome, and the client gets no records of it yet."""
        request = held.request
        behind = [index for index, judgement in judgements.items() if judgement.verdict is Verdict.LOCAL]
        if not behind:
            return {}
        numbers: dict[PartitionKey, int] = {}
        async for part in slices_of(range(len(request.partitions))):
            for n in part:
                numbers[request.partitions[n].topic, request.partitions[n].partition] = n
        entries = [(index, response.partitions[index]) for index in behind]
        indexes = {numbers[entry.topic, entry.partition]: index for index, entry in entries}
        answer = await self._fetch(held, response, {n: judgements[index].position for n, index in indexes.items()})
        if answer is None:
            return {}
        log_starts = await in_turns(self._local.log_start_offsets(answer))
        outcomes: dict[int, RemoteOutcome] = {}
        async for places in slices_of(range(len(answer.partitions)), SLICE_ITEMS):
            for place in places:
                entry = answer.partitions[place]
                number = numbers.get((entry.topic, entry.partition), -1)
                if number in indexes:
                    index = indexes[number]
                    outcomes[index] = self._outcome(
                        answer,
                        entry,
                        request.partitions[number],
                        judgements[index],
                        is_read_committed=request.is_read_committed,
                        log_start_offset=log_starts.get(place),
                    )
        return outcomes

    async def _fetch(
        self, held: HeldFetch, response: FetchResponse, fetch_offsets: Mapping[int, int]
    ) -> FetchResponse | None:
        request, tools = held.request, self._tools
        used_bytes = sum(entry.records_bytes for entry in response.partitions)
        used_bytes += sum(read.request.max_bytes for read in held.reads.values())
        frame = await in_turns(request.with_only(fetch_offsets.keys(), fetch_offsets))
        patch_fetch_request(
            frame,
            request.body_position,
            request.version,
            max_wait_ms=0,
            max_bytes=max(1, min(tools.settings.hold_bytes, held.grant.max_bytes - used_bytes)),
            session_id=NO_SESSION_ID,
            session_epoch=FINAL_SESSION_EPOCH,
        )
        now_ms = tools.clock_ms()
        asked = held.exchange.try_forward(bytes(frame))
        if asked is None:
            return None
        try:
            async with asyncio.timeout(max(1, answer_by_ms(held, response, now_ms) - now_ms) / 1000):
                payload = await asked
            body_position = response_body_position(ApiKey.FETCH, request.version, payload)
            return await in_turns(parse_fetch_response.steps(payload, body_position, request.version))
        except (TimeoutError, BrokerGoneError):
            return None
        except ProtocolError as error:
            logger.warning("the broker's answer for the offsets behind a gap cannot be read: %s", error)
            return None

    def _outcome(
        self,
        answer: FetchResponse,
        entry: FetchResponsePartition,
        asked: FetchPartition,
        judgement: Judgement,
        *,
        is_read_committed: bool,
        log_start_offset: int | None,
    ) -> RemoteOutcome:
        if entry.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            return RemoteOutcome(UNAVAILABLE)  # the broker trimmed its log meanwhile; the next request is judged again
        outcome = RemoteOutcome(
            entry.error_code,
            Watermarks(entry.high_watermark, entry.last_stable_offset),
            entry.log_start_offset if log_start_offset is None else log_start_offset,
        )
        first = next(iterate_batches(answer.records(entry)), None)
        if first is not None and is_within_gap(asked, judgement.position, first.base_offset):
            return replace(outcome, read=self.across(answer.version, judgement, asked))
        if entry.error_code or entry.records_bytes or entry.preferred_read_replica >= 0:
            buffers: list[Buffer] = [answer.payload[entry.start : entry.end]]
            if log_start_offset is not None:
                patched = bytearray(answer.payload[entry.start : entry.end])
                INT64.pack_into(patched, LOG_START_OFFSET_AT, log_start_offset)
                buffers = [patched]
            return replace(outcome, replacement=LocalReplacement(buffers, entry.records_bytes))
        readable_to = entry.last_stable_offset if is_read_committed else entry.high_watermark
        if not 0 <= readable_to <= judgement.position or asked.fetch_offset <= 0:
            return outcome
        return replace(outcome, read=self.across(answer.version, judgement, asked))

    def across(self, version: int, judgement: Judgement, asked: FetchPartition) -> RemoteRead:
        """Returns the read that moves the client's position across the gap.

        Its leader epoch is that of the last record before the gap, or -1 when that epoch is unknown. A later leader
        epoch would be wrong: the records behind the gap may have a lower one."""
        leader_epoch = asked.last_fetched_epoch
        if leader_epoch < 0 and judgement.partition is not None:
            leader_epoch = self._epoch_before_gap(judgement.partition, asked.fetch_offset)
        batch = memoryview(gap_batch(version, asked.fetch_offset, judgement.position, leader_epoch))
        return RemoteRead([batch], len(batch), asked.fetch_offset, judgement.position, ())

    def _epoch_before_gap(self, partition: TopicIdPartition, offset: int) -> int:
        try:
            return self._tools.log.remote(partition).epoch_before_gap(offset)
        except RemoteLogError:
            return UNKNOWN_EPOCH


def is_within_gap(asked: FetchPartition, position: int, base_offset: int) -> bool:
    """Whether a batch at `base_offset` begins in the gap that holds the requested offset and ends at `position`.

    False at offset 0: no record lies below such a gap, so no batch can move a client across it."""
    return 0 < asked.fetch_offset < position and base_offset < position
