"""Producers of a simulated topic: single batches, and transactions that commit, abort or hang."""

from __future__ import annotations

import asyncio
import random
import struct
from typing import NamedTuple

import google_crc32c

from protocol.errors import ErrorCode
from tests.support.fakes.record_batches import build_batch, record
from tests.support.simulation.apis import SimApis
from tests.support.simulation.cluster import SimCluster, SimPartition
from tests.support.simulation.loop import VirtualLoop

_BASE_SEQUENCE_AT = 53


class Produced(NamedTuple):
    error_code: int
    base_offset: int
    at_ms: int


class Producer:
    """Writes to one partition until it is cancelled."""

    def __init__(
        self, loop: VirtualLoop, rng: random.Random, cluster: SimCluster, apis: SimApis, partition: SimPartition
    ) -> None:
        self.loop = loop
        self.rng = rng
        self.cluster = cluster
        self.apis = apis
        self.partition = partition
        self.hangs_s = 0.0
        """How long the next transaction stays open."""
        self.is_idle = False
        self._number = 0

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._batches())
            group.create_task(self._transactions())

    async def _batches(self) -> None:
        while True:
            await asyncio.sleep(self.rng.expovariate(2.0))
            if not self.is_idle:
                await self.send(-1, -1, -1)

    async def _transactions(self) -> None:
        while True:
            await asyncio.sleep(self.rng.uniform(3, 12))
            if not self.is_idle:
                await self.transaction()

    async def transaction(self) -> None:
        coordinator = self.apis.transactions
        hangs_s, self.hangs_s = self.hangs_s, 0.0
        producer_id = coordinator.begin(self.partition)
        sequence = 0
        for _ in range(self.rng.randint(1, 3)):
            count = await self.send(producer_id, 0, sequence)
            sequence += count
            await asyncio.sleep(self.rng.uniform(0.05, 0.6))
        await asyncio.sleep(hangs_s)
        coordinator.finish(producer_id, is_commit=self.rng.random() < 0.6)

    async def send(self, producer_id: int, epoch: int, sequence: int) -> int:
        """Sends one batch, once. Returns how many records were acknowledged."""
        partition, rng = self.partition, self.rng
        node = partition.leader
        stale = [one for one in self.cluster.brokers.values() if one.is_cut_off and one.is_up]
        if stale and rng.random() < 0.3:
            node = stale[0].node_id
        is_known = partition.topic.name in self.cluster.topics
        if node < 0 or not self.cluster.brokers[node].is_up or not is_known:
            return 0
        now_ms, count = self.cluster.wall_ms(), rng.randint(1, 5)
        made = []
        for offset in range(count):
            self._number += 1
            value = b"%s-%d-" % (str(partition).encode(), self._number)
            made.append(record(offset, now_ms, value=value.ljust(rng.randint(20, 60), b"x")))
        is_transactional = producer_id >= 0
        data = bytearray(
            build_batch(
                0, made, producer_id=producer_id, producer_epoch=epoch if is_transactional else -1,
                transactional=is_transactional,
            )
        )  # fmt: skip
        if is_transactional:
            data = _with_sequence(data, sequence)
        answer = self.apis.produce(self.cluster.brokers[node], partition, bytes(data), Produced)
        if isinstance(answer, Produced):
            return count if answer.error_code == ErrorCode.NONE else 0
        await asyncio.wait({answer}, timeout=5.0)
        return count if answer.done() and answer.result().error_code == ErrorCode.NONE else 0


def _with_sequence(data: bytearray, sequence: int) -> bytearray:
    struct.pack_into(">i", data, _BASE_SEQUENCE_AT, sequence)
    struct.pack_into(">I", data, 17, google_crc32c.value(bytes(data[21:])))
    return data
