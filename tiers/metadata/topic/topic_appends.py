"""`TopicAppends`: the appends to the metadata topic that need no ownership.

Some changes are made one after the other in the whole cluster, since they depend on those before: of a topic's tier
settings, of the marker of a location, and what an operator restores (`Append.IN_TURN`). The writer initializes a
transactional.id of the metadata partition, which fences every writer that has not committed yet, reads to the end,
checks and writes. So no other change came between. A fenced writer checks its change again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tiers.backoff import Backoff
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.errors import OwnershipLostError, RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import Append, MakeRecords
from tiers.metadata.topic.follower import MetadataFollower
from tiers.metadata.topic.metadata_producer import ClockSkew, MetadataProducer, TransactionalProducer
from tiers.metadata.topic.metadata_topic import MetadataTopic

_BACKOFF = Backoff(base_ms=50, cap_ms=500)


def in_turn_transactional_id(group_id: str, metadata_partition: int) -> str:
    return f"{group_id}-tier-configs-{metadata_partition}"


class TopicAppends:
    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        follower: MetadataFollower,
        group_id: str,
        clock_skew: ClockSkew,
    ) -> None:
        self._client = client
        self._topic = topic
        self._follower = follower
        self._group_id = group_id
        self._clock_skew = clock_skew
        self._appending: defaultdict[tuple[Append, int], asyncio.Lock] = defaultdict(asyncio.Lock)

    async def append(self, number: int, records: MakeRecords, by: Append, timeout_ms: int) -> None:
        """Appends to the metadata partition `number`, and returns after the follower has read the records."""
        deadline_ms = monotonic_ms() + timeout_ms
        if by is Append.AT_ONCE:
            await self._send(number, records, deadline_ms)
            return
        async with _held(self._appending[by, number], timeout_ms):
            if by is Append.IN_TURN:
                await self._append_in_turn(number, records, deadline_ms)
            else:
                # The state must contain what this process wrote before. Otherwise it would write the same record again.
                await self._follower.ensure_fresh(number, 0, deadline_ms - monotonic_ms())
                await self._send(number, records, deadline_ms)

    async def _append_in_turn(self, number: int, records: MakeRecords, deadline_ms: int) -> None:
        failures = 0
        while True:
            name = in_turn_transactional_id(self._group_id, number)
            producer = TransactionalProducer(self._client, self._topic, number, name)
            try:
                await producer.initialize(deadline_ms - monotonic_ms())
                await self._follower.ensure_fresh(number, 0, deadline_ms - monotonic_ms())
                made, before = records(), self._follower.known(number)
                if made:
                    written = await producer.commit(made, None, deadline_ms - monotonic_ms())
                    await self._follower.read_past(number, written, before, deadline_ms - monotonic_ms())
                return
            except OwnershipLostError:
                failures += 1
                pause_ms = _BACKOFF.pause_ms(failures)
                if monotonic_ms() + pause_ms >= deadline_ms:
                    raise
                await asyncio.sleep(pause_ms / 1000)

    async def _send(self, number: int, records: MakeRecords, deadline_ms: int) -> None:
        made, before = records(), self._follower.known(number)
        if made:
            producer = MetadataProducer(self._client, self._topic, clock_skew=self._clock_skew)
            # The request may be repeated, and the records may not be wanted any more by then.
            written = await producer.send(number, made, deadline_ms - monotonic_ms(), lambda: _made_again(records))
            await self._follower.read_past(number, written, before, deadline_ms - monotonic_ms())


def _made_again(records: MakeRecords) -> None:
    records()


@asynccontextmanager
async def _held(lock: asyncio.Lock, timeout_ms: int) -> AsyncIterator[None]:
    """Holds the lock. Raises `RemoteLogMetadataNotReadyError` when another task holds it for `timeout_ms`."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await lock.acquire()
    except TimeoutError as error:
        raise RemoteLogMetadataNotReadyError(f"an earlier write did not end in {timeout_ms} ms") from error
    try:
        yield
    finally:
        lock.release()
