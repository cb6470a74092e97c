"""Random operations on one partition, and what a broker answers to them: for the simulated broker and a real one.

An operation names offsets and producers by numbers that fit any broker. The answers leave out what brokers choose
freely: producer ids, times and the ids of topics.
"""

from __future__ import annotations

import asyncio
import random
import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple
from uuid import UUID

import google_crc32c
from kafka.protocol.admin import DeleteRecordsRequest
from kafka.protocol.consumer import ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata import MetadataRequest
from kafka.protocol.producer import (
    AddPartitionsToTxnRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    ProduceRequest,
)

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import build_batch, record
from tiers.broker.client import BrokerClient
from tiers.broker.fetch import FetchPosition, fetch_raw
from tiers.metadata.topic.metadata_producer import TRANSACTION_COORDINATOR, find_coordinator

_TIMEOUT_MS = 20_000
_CONCURRENT, _COORDINATOR_TROUBLE = 51, (14, 15, 16)


class Operation(NamedTuple):
    kind: str
    number: int = 0
    other: int = 0


def operations(seed: int, count: int) -> list[Operation]:
    rng = random.Random(f"{seed}-operations")
    made: list[Operation] = []
    is_open, end = False, 0
    for _ in range(count):
        kind = rng.choices(
            ["produce", "begin", "txn-produce", "end", "zombie", "delete", "fetch", "list", "epoch", "metadata"],
            [4, 2, 3, 2, 1, 1, 7, 2, 3, 1],
        )[0]
        if kind == "begin":
            if is_open:
                continue
            is_open = True
        elif kind in ("txn-produce", "end"):
            if not is_open:
                continue
            is_open = kind != "end"
        if kind in ("produce", "txn-produce"):
            records = rng.randint(1, 5)
            made.append(Operation(kind, records))
            end += records
        elif kind == "fetch":
            made.append(Operation(kind, rng.randint(0, end + 3), rng.choice((-1, -1, 0, 0, 1))))
        elif kind == "delete":
            made.append(Operation(kind, rng.choice((-1, rng.randint(0, end + 3)))))
        elif kind == "epoch":
            made.append(Operation(kind, rng.randint(-1, 3)))
        elif kind == "list":
            made.append(Operation(kind, rng.choice((-1, -2)), rng.randint(0, 1)))
        else:
            made.append(Operation(kind, rng.randint(0, 1)))
            end += kind == "end"
    return made


class AnsweringBroker:
    """Does the operations on a topic of one partition, which exists."""

    def __init__(self, client: BrokerClient, topic: str, topic_id: UUID, node_id: int, transactional_id: str) -> None:
        self._client = client
        self._topic = topic
        self._topic_id = topic_id
        self._node_id = node_id
        self._transactional_id = transactional_id
        self._producer = -1, -1
        self._zombie = -1, -1
        self._sequence = 0
        self._names: dict[int, str] = {}

    async def wait_until_led(self) -> None:
        """A new topic is in the metadata before its leader knows it."""
        while (await self._fetch(0, -1, 0))[0]:  # noqa: ASYNC110  # a broker has no events
            await asyncio.sleep(0.02)

    async def answers(self, asked: Sequence[Operation]) -> list[Any]:
        return [(one, await self._do(one)) for one in asked]

    async def _do(self, asked: Operation) -> Any:
        match asked.kind:
            case "produce":
                return await self._produce(self._batch(asked.number, -1, -1, -1))
            case "begin":
                return await self._begin()
            case "txn-produce":
                data = self._batch(asked.number, *self._producer, self._sequence)
                answer = await self._produce(data, self._transactional_id)
                self._sequence += asked.number
                return answer
            case "zombie":
                if self._zombie[0] < 0:
                    return None
                return (await self._produce(self._batch(1, *self._zombie, 1_000), self._transactional_id))[0]
            case "end":
                return await self._end(bool(asked.number))
            case "delete":
                return await self._delete(asked.number)
            case "fetch":
                return [await self._fetch(asked.number, asked.other, isolation) for isolation in (0, 1)]
            case "metadata":
                return await self._described(bool(asked.number))
            case "list":
                return await self._list(asked.number, asked.other)
            case _:
                return await self._epoch(asked.number)

    def _batch(self, count: int, producer_id: int, epoch: int, sequence: int) -> bytes:
        # Records of another time than their markers would make a broker roll segments, which a Fetch never crosses.
        now_ms = time.time_ns() // 1_000_000
        made = [record(offset, now_ms) for offset in range(count)]
        data = bytearray(
            build_batch(0, made, producer_id=producer_id, producer_epoch=epoch, transactional=producer_id >= 0)
        )
        struct.pack_into(">i", data, 53, sequence)
        struct.pack_into(">I", data, 17, google_crc32c.value(bytes(data[21:])))
        return bytes(data)

    async def _produce(self, data: bytes, transactional_id: str | None = None) -> tuple[int, int]:
        topic = ProduceRequest.TopicProduceData
        message = ProduceRequest(
            transactional_id=transactional_id,
            acks=-1,
            timeout_ms=_TIMEOUT_MS,
            topic_data=[
                topic(name=self._topic, partition_data=[topic.PartitionProduceData(index=0, records=data)]),
            ],
        )
        response = await self._client.request(self._node_id, message, _TIMEOUT_MS, min_version=7, max_version=11)
        answer = response.responses[0].partition_responses[0]
        return int(answer.error_code), int(answer.base_offset)

    async def _coordinated(self, message: Any, max_version: int) -> Any:
        node_id = await find_coordinator(self._client, self._transactional_id, TRANSACTION_COORDINATOR, _TIMEOUT_MS)
        return await self._client.request(node_id, message, _TIMEOUT_MS, max_version=max_version)

    async def _begin(self) -> int:
        while True:
            message = InitProducerIdRequest(
                transactional_id=self._transactional_id, transaction_timeout_ms=60_000, producer_id=-1,
                producer_epoch=-1,
            )  # fmt: skip
            response = await self._coordinated(message, 4)
            if response.error_code not in (_CONCURRENT, *_COORDINATOR_TROUBLE):
                break
            await asyncio.sleep(0.05)
        if self._producer[0] >= 0:
            self._zombie = self._producer
        self._producer, self._sequence = (response.producer_id, response.producer_epoch), 0
        self._names.setdefault(response.producer_id, f"producer {len(self._names)}")
        while True:
            message = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self._transactional_id,
                v3_and_below_producer_id=self._producer[0],
                v3_and_below_producer_epoch=self._producer[1],
                v3_and_below_topics=[
                    AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=self._topic, partitions=[0])
                ],
            )
            added = await self._coordinated(message, 3)
            code = int(added.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code)
            if code not in (_CONCURRENT, *_COORDINATOR_TROUBLE):
                return code
            await asyncio.sleep(0.05)

    async def _end(self, committed: bool) -> int:
        before = await self._list(-1, 0)
        while True:
            message = EndTxnRequest(
                transactional_id=self._transactional_id,
                producer_id=self._producer[0],
                producer_epoch=self._producer[1],
                committed=committed,
            )
            response = await self._coordinated(message, 3)
            if response.error_code not in (_CONCURRENT, *_COORDINATOR_TROUBLE):
                break
            await asyncio.sleep(0.05)
        # Until the marker is there.
        while (end := await self._list(-1, 0)) == before or end != await self._list(-1, 1):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return int(response.error_code)

    async def _delete(self, offset: int) -> tuple[int, int]:
        request = DeleteRecordsRequest
        topic = request.DeleteRecordsTopic
        partition = topic.DeleteRecordsPartition(partition_index=0, offset=offset)
        message = request(topics=[topic(name=self._topic, partitions=[partition])], timeout_ms=_TIMEOUT_MS)
        answer = (await self._client.request(self._node_id, message, _TIMEOUT_MS)).topics[0].partitions[0]
        return int(answer.error_code), int(answer.low_watermark)

    async def _fetch(self, offset: int, last_fetched_epoch: int, isolation_level: int) -> Any:
        position = FetchPosition(self._topic_id, 0, offset, 0, max_bytes=400, last_fetched_epoch=last_fetched_epoch)
        (found,) = await fetch_raw(
            self._client, self._node_id, [position], max_bytes=400, isolation_level=isolation_level,
            timeout_ms=_TIMEOUT_MS,
        )  # fmt: skip
        batches = [
            (one.base_offset, one.last_offset, one.is_control, one.is_transactional)
            for one in iterate_batches(bytes(found.records))
            if one.end <= len(found.records)
        ]
        aborted = [(self._names.get(one.producer_id), one.first_offset) for one in found.aborted_transactions]
        diverging = None if found.diverging is None else (found.diverging.leader_epoch, found.diverging.end_offset)
        return (
            found.error, found.high_watermark, found.last_stable_offset, found.log_start_offset, aborted, batches,
            diverging,
        )  # fmt: skip

    async def _list(self, timestamp: int, isolation_level: int) -> tuple[int, int]:
        topic = ListOffsetsRequest.ListOffsetsTopic
        partition = topic.ListOffsetsPartition(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)
        message = ListOffsetsRequest(
            replica_id=-1, isolation_level=isolation_level, topics=[topic(name=self._topic, partitions=[partition])]
        )
        answer = (
            (await self._client.request(self._node_id, message, _TIMEOUT_MS, max_version=8)).topics[0].partitions[0]
        )
        return int(answer.error_code), int(answer.offset)

    async def _described(self, is_known: bool) -> Any:
        """Asks for a topic by its id, and by its name."""
        topic_id, name = (self._topic_id, self._topic) if is_known else (UUID(int=77), "nothing")
        answers = []
        for asked in ({"topic_id": topic_id, "name": None}, {"topic_id": UUID(int=0), "name": name}):
            message = MetadataRequest(
                topics=[MetadataRequest.MetadataRequestTopic(**asked)], allow_auto_topic_creation=False
            )
            (answer,) = (await self._client.request(self._node_id, message, _TIMEOUT_MS, min_version=12)).topics
            says = answer.topic_id in (UUID(int=0), topic_id), answer.name in (None, "", name)
            known = answer.topic_id == topic_id, answer.name == name
            answers.append((int(answer.error_code), says, known, len(answer.partitions)))
        return answers

    async def _epoch(self, leader_epoch: int) -> tuple[int, int, int]:
        topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
        partition = topic.OffsetForLeaderPartition(partition=0, current_leader_epoch=-1, leader_epoch=leader_epoch)
        message = OffsetForLeaderEpochRequest(replica_id=-1, topics=[topic(topic=self._topic, partitions=[partition])])
        response = await self._client.request(self._node_id, message, _TIMEOUT_MS, min_version=2)
        answer = response.topics[0].partitions[0]
        return int(answer.error_code), int(answer.leader_epoch), int(answer.end_offset)
