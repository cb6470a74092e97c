"""A topic whose last records are lost: a proxy in front of a real Kafka that has only the records before a gap.

The proxy answers a Fetch within the gap as a test sets. No record follows the gap until the test produces one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from protocol.api_keys import ApiKey
from protocol.apis.fetch.encoding import encode_partition
from protocol.apis.fetch.request import FINAL_SESSION_EPOCH, FetchRequest, parse_fetch_request, patch_fetch_request
from protocol.apis.fetch.response import parse_fetch_response, rebuild_response
from protocol.apis.list_offsets import (
    EARLIEST_TIMESTAMP,
    ListOffsetsAnswer,
    ListOffsetsRequest,
    parse_list_offsets_request,
    parse_list_offsets_response,
    patch_list_offsets_response,
)
from protocol.errors import ErrorCode
from protocol.header import parse_request_header, response_body_position
from protocol.primitives import Buffer
from protocol.records.record_batch import skip_to_offset
from proxy.wire.exchange import Buffers, Exchange, Forward, HandlerState
from tests.support.proxy.one_worker import one_worker
from tests.support.proxy.parsed_config import parse_config
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of
from tests.support.servers.ports import consecutive_free_ports
from tests.support.servers.producing import create_topic, produce

TIMEOUT_S = 300.0
LEADER_EPOCH = 0


class Fetched(NamedTuple):
    """A partition entry of a client's request."""

    version: int
    offset: int


AnswerInGap = Callable[[Fetched], Buffer]
"""Returns the records of the answer to a Fetch within the gap."""


@dataclass
class GapStage:
    """The records are at `[0, start)`, and the gap is `[start, end)`. The broker's log continues at `end`."""

    topic: str
    topic_id: UUID
    values: list[bytes]
    end: int
    head: bytes
    answer_in_gap: AnswerInGap
    bootstrap: str = ""
    fetches: list[Fetched] = field(default_factory=list)
    """The fetches of clients, in order."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def start(self) -> int:
        return len(self.values)

    @property
    def in_gap(self) -> list[int]:
        """Returns the offsets within the gap that clients requested."""
        return [one.offset for one in self.fetches if self.start <= one.offset < self.end]

    async def until_fetched(self, offset: int) -> None:
        """Returns when a client has requested that offset."""
        async with asyncio.timeout(TIMEOUT_S):
            while all(one.offset != offset for one in self.fetches):
                self.changed.clear()
                await self.changed.wait()

    def records_at(self, fetched: Fetched) -> Buffer:
        if fetched.offset < self.start:
            return memoryview(self.head)[skip_to_offset(self.head, fetched.offset) :]
        return self.answer_in_gap(fetched)


@asynccontextmanager
async def gap_stage(
    kafka: KafkaCluster, topic: str, count: int, gap: int, answer_in_gap: AnswerInGap
) -> AsyncIterator[GapStage]:
    """Yields a stage with `count` records, followed by a gap of `gap` offsets."""
    stage = await asyncio.to_thread(_prepare, kafka, topic, count, gap, answer_in_gap)
    port = consecutive_free_ports(1 + len(kafka.brokers))
    config = parse_config(
        f"""
[upstream]
bootstrap.servers = "{kafka.bootstrap_servers}"
[listener]
host = "127.0.0.1"
advertised.host = "127.0.0.1"
bootstrap.port = {port}
base.port = {port}
"""
    )
    async with AsyncExitStack() as stack:
        proxy = one_worker(config, stack)
        await proxy.open(stack)
        proxy.handlers[ApiKey.FETCH] = _FetchHandler(stage)
        proxy.handlers[ApiKey.LIST_OFFSETS] = _ListOffsetsHandler()
        proxy.listen(stack)
        await proxy.topology.refresh()
        stage.bootstrap = f"127.0.0.1:{port}"
        yield stage
        await proxy.drain()


def _prepare(kafka: KafkaCluster, topic: str, count: int, gap: int, answer_in_gap: AnswerInGap) -> GapStage:
    bootstrap = kafka.bootstrap_servers
    create_topic(bootstrap, topic)
    topic_id = topic_id_of(bootstrap, topic)
    values = [f"{topic}:{n}".encode() for n in range(count)]
    produce(bootstrap, topic, values)
    with Peer(kafka.address(next(iter(kafka.brokers)))) as peer:
        response = peer.fetch(13, topic, topic_id, 0)
        head = bytes(response.records(response.partitions[0]))
    produce(bootstrap, topic, [b"lost"] * gap, records_per_batch=1000)
    at = TopicPartition(topic, 0, count + gap)
    admin = AdminClient({"bootstrap.servers": bootstrap})  # the name keeps the client alive until the answer comes
    admin.delete_records([at])[at].result(TIMEOUT_S)
    return GapStage(topic, topic_id, values, count + gap, head, answer_in_gap)


def _fetched(request: FetchRequest) -> list[Fetched]:
    return [Fetched(request.version, one.fetch_offset) for one in request.partitions]


class _FetchHandler:
    """Handles Fetch without sessions, so every request names its offsets."""

    def __init__(self, stage: GapStage) -> None:
        self._stage = stage

    def on_request(self, exchange: Exchange) -> tuple[Forward, HandlerState]:
        request = exchange.request
        body_position = parse_request_header(request.frame).body_position
        frame = bytearray(request.frame)
        patch_fetch_request(frame, body_position, request.api_version, session_id=0, session_epoch=FINAL_SESSION_EPOCH)
        parsed = parse_fetch_request(frame, body_position, request.api_version)
        self._stage.fetches += _fetched(parsed)
        self._stage.changed.set()
        return Forward(bytes(frame), hold_bytes=None), _Fetch(self._stage, parsed)


class _Fetch:
    def __init__(self, stage: GapStage, request: FetchRequest) -> None:
        self._stage = stage
        self._request = request

    def on_response(self, response: memoryview) -> Buffers:
        version = self._request.version
        stage = self._stage
        parsed = parse_fetch_response(response, response_body_position(ApiKey.FETCH, version, response), version)
        entries = {}
        for index, (asked, answered) in enumerate(zip(_fetched(self._request), parsed.partitions, strict=True)):
            assert answered.topic in (stage.topic, stage.topic_id)
            if answered.error_code != ErrorCode.OFFSET_OUT_OF_RANGE or asked.offset >= stage.end:
                continue
            entries[index] = encode_partition(
                version,
                answered.partition,
                high_watermark=stage.end,
                last_stable_offset=stage.end,
                log_start_offset=0,
                aborted_transactions=() if self._request.is_read_committed else None,
                records=(stage.records_at(asked),),
            )
        return rebuild_response(parsed, entries=entries)

    def on_abandoned(self) -> None:
        pass


class _ListOffsetsHandler:
    """Answers offset 0 for the earliest offset, as a tier with that log start does."""

    def on_request(self, exchange: Exchange) -> tuple[Forward, HandlerState]:
        request = exchange.request
        body_position = parse_request_header(request.frame).body_position
        parsed = parse_list_offsets_request(request.frame, body_position, request.api_version)
        return Forward(request.frame, hold_bytes=None), _ListOffsets(parsed)


class _ListOffsets:
    def __init__(self, request: ListOffsetsRequest) -> None:
        self._request = request

    def on_response(self, response: memoryview) -> Buffers:
        version = self._request.version
        body_position = response_body_position(ApiKey.LIST_OFFSETS, version, response)
        parsed = parse_list_offsets_response(response, body_position, version)
        earliest = {
            index: ListOffsetsAnswer(offset=0, leader_epoch=LEADER_EPOCH)
            for index, asked in enumerate(self._request.partitions)
            if asked.timestamp == EARLIEST_TIMESTAMP
        }
        return (patch_list_offsets_response(parsed, earliest),)

    def on_abandoned(self) -> None:
        pass
