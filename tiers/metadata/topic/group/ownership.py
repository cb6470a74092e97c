"""`MetadataPartitionOwnership` decides which metadata partitions this process may write, and writes to them.

Taking over a partition and recovering from an error are the same steps. The process initializes the producer, which
fences every older producer and ends its transaction. Then it reads to the high watermark as of a later time, and owns
the partition. After an `OwnershipLostError` a newer owner exists, so the process only asks for a new assignment. It
initializes a producer only if the group confirmed its membership a moment ago: a stale member must not fence the owner.

A rebalance ends the ownership of everything, and the new generation may assign a partition to this process again. Work
goes on then if its tenure does (`Tenures`). A write of such work waits for the ownership.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from tiers.backoff import Backoff
from tiers.broker.client import BrokerClient
from tiers.errors import OwnershipLostError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.metadata_log import Tenure, begun_in
from tiers.metadata.records.serde import KeyAndValue, check_writable
from tiers.metadata.topic.follower import MetadataFollower
from tiers.metadata.topic.group.membership import Assignment, GroupMembership
from tiers.metadata.topic.metadata_producer import ClockSkew, GroupMember, TransactionalProducer
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.topic_appends import in_turn_transactional_id

logger = logging.getLogger(__name__)

CONFIRMATION_MAX_AGE_MS = 2_000
AWAIT_MS = 30_000
"""How long work waits for the ownership. A rebalance with a dead member takes about 12 s, and a takeover some more."""
_INITIALIZE_TIMEOUT_MS = 15_000
_READ_TIMEOUT_MS = 15_000
_HELD_BACK_AFTER_MS = 2_000
"""The time in which the follower reads all committed records. A longer wait means that an open transaction is ahead."""
_TAKEOVERS_AT_ONCE = 8
_CONFIRMED_AGAIN_MS = 20
_BACKOFF = Backoff(base_ms=100, cap_ms=2_000)


@dataclass(slots=True)
class _Held:
    tenure: Tenure
    member: GroupMember
    reading: int
    owned_at_ms: int


class Tenures:
    """The tenure of each metadata partition that this process owns, or waits to own again.

    A tenure goes on when the group assigns the partition to the same member in the same generation or in the next one:
    no other member had an assignment in between. If this member has missed a generation, another one may have owned the
    partition in it, so the tenure ends. It also ends when the process has not owned the partition for `AWAIT_MS`, and
    when another `reading` of the records begins: work may have seen a part of them."""

    def __init__(self, clock_ms: Callable[[], int], reading: Callable[[], int]) -> None:
        self._clock_ms = clock_ms
        self._reading = reading
        self._held: dict[int, _Held] = {}
        self._numbers = count()

    def assigned(self, assignment: Assignment) -> None:
        """Ends the tenures of the partitions that others own now, or may have owned since."""
        member = assignment.member
        for number, held in list(self._held.items()):
            is_next = 0 <= member.generation_id - held.member.generation_id <= 1
            if number in assignment.metadata_partitions and is_next and member.member_id == held.member.member_id:
                held.member = member
            else:
                del self._held[number]

    def owned(self, number: int, member: GroupMember) -> Tenure:
        """Returns the tenure of a partition that this process owns now. It begins if there is none.

        The time of the last call does not matter: while this process owns the partition, no other one does."""
        held, reading = self._held.get(number), self._reading()
        if held is None or held.reading != reading:
            held = self._held[number] = _Held(Tenure(number, next(self._numbers)), member, reading, 0)
        held.owned_at_ms = self._clock_ms()
        return held.tenure

    def awaited(self, number: int) -> Tenure | None:
        """Returns the tenure of a partition that this process waits to own again; None: the tenure has ended."""
        held = self._held.get(number)
        if held is None:
            return None
        if held.reading != self._reading() or self._clock_ms() - held.owned_at_ms > AWAIT_MS:
            del self._held[number]
            return None
        return held.tenure

    def goes_on(self, tenure: Tenure) -> bool:
        held = self._held.get(tenure.metadata_partition)
        return held is not None and held.tenure == tenure and held.reading == self._reading()


@dataclass(slots=True, eq=False)
class _OwnedPartition:
    producer: TransactionalProducer
    assignment: Assignment
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class MetadataPartitionOwnership:
    def __init__(
        self,
        client: BrokerClient,
        topic: MetadataTopic,
        follower: MetadataFollower,
        settings: TopicBasedSettings,
        *,
        clock_ms: Callable[[], int],
        clock_skew: ClockSkew,
    ) -> None:
        self._client = client
        self._topic = topic
        self._follower = follower
        self._group_id = settings.group_id
        self._clock_ms = clock_ms
        self._clock_skew = clock_skew
        self._membership = GroupMembership(
            client, topic, settings, clock_ms=clock_ms, on_assigned=self._on_assigned, on_revoked=self._on_revoked
        )
        self._assignment: Assignment | None = None
        self._owned: dict[int, _OwnedPartition] = {}
        self._takeovers: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(_TAKEOVERS_AT_ONCE)
        self._tasks: asyncio.TaskGroup | None = None
        self._tenures = Tenures(clock_ms, follower.reading)
        self.suspended_for: str | None = None
        """Why this process owns nothing although partitions are assigned to it. `TopicBasedMetadataLog` sets it."""

    async def run(self) -> None:
        """Is a member of the group until cancelled."""
        async with asyncio.TaskGroup() as self._tasks:
            await self._membership.run()

    def owns(self, metadata_partition: int) -> bool:
        """Returns whether this task may write to the partition now: the process owns it, and the task's tenure goes on.

        It may not while the state is read again: forgotten records would look as if they were never written."""
        begun = begun_in(metadata_partition)
        return self._is_owner(metadata_partition) and (begun is None or self._tenures.goes_on(begun))

    def _is_owner(self, metadata_partition: int) -> bool:
        return (
            metadata_partition in self._owned
            and self.suspended_for is None
            and self._follower.fresh_at_ms(metadata_partition) is not None
            and self._is_confirmed()
        )

    def _is_confirmed(self) -> bool:
        return self._membership.is_confirmed(CONFIRMATION_MAX_AGE_MS)

    def tenure(self, metadata_partition: int) -> Tenure | None:
        """Returns the tenure of a partition that this process owns, or may own again; None: it has ended."""
        if self._is_owner(metadata_partition):
            return self._tenures.owned(metadata_partition, self._owned[metadata_partition].assignment.member)
        return self._tenures.awaited(metadata_partition)

    def owned(self) -> frozenset[int]:
        return frozenset(number for number in self._owned if self.owns(number))

    async def write(
        self, metadata_partition: int, records: Callable[[], Sequence[KeyAndValue]], timeout_ms: int
    ) -> None:
        """Commits the records that `records` returns, and waits until this process has read them.

        `records` is called when no other write is in progress and all earlier writes have been replayed. Work that was
        begun in a tenure waits for the ownership while the tenure lasts (`begin_in`). Raises `RemoteLogMetadataError`,
        also when a member of the group does not read records of these types."""
        tenure = begun_in(metadata_partition)
        deadline_ms = self._clock_ms() + AWAIT_MS
        while True:
            owned = await self._until_owned(metadata_partition, tenure, deadline_ms)
            async with owned.lock:
                if tenure is None and self._owned.get(metadata_partition) is not owned:
                    raise OwnershipLostError(f"metadata partition {metadata_partition} was lost during the wait")
                if self._owned.get(metadata_partition) is not owned or not self.owns(metadata_partition):
                    continue
                try:
                    await self._write(metadata_partition, owned, records, timeout_ms)
                    return
                except OwnershipLostError:
                    # Nothing was committed, or the state shows it when `records` is called again.
                    if tenure is None or self.tenure(metadata_partition) != tenure or self._clock_ms() >= deadline_ms:
                        raise

    async def _until_owned(self, metadata_partition: int, tenure: Tenure | None, deadline_ms: int) -> _OwnedPartition:
        """Waits until this process owns the partition in the tenure. Raises `OwnershipLostError`.

        Without a tenure, it only waits for a late heartbeat. A heartbeat is late when this process or a broker paused.
        Ownership is not lost by that, and the next heartbeat shows whether the generation has ended."""
        if tenure is None:
            deadline_ms = self._clock_ms() + CONFIRMATION_MAX_AGE_MS
        while True:
            owned = self._owned.get(metadata_partition)
            if tenure is not None and self.tenure(metadata_partition) != tenure:
                raise OwnershipLostError(f"another member may have owned metadata partition {metadata_partition} since")
            if owned is not None and self.owns(metadata_partition):
                return owned
            is_late = owned is not None and not self.suspended_for and not self._is_confirmed()
            if not (is_late or tenure is not None) or self._clock_ms() >= deadline_ms:
                raise OwnershipLostError(f"this process does not own metadata partition {metadata_partition}")
            await asyncio.sleep(_CONFIRMED_AGAIN_MS / 1000)

    async def _write(
        self,
        metadata_partition: int,
        owned: _OwnedPartition,
        records: Callable[[], Sequence[KeyAndValue]],
        timeout_ms: int,
    ) -> None:
        to_write = records()
        check_writable(to_write, owned.assignment.record_types)
        before = self._follower.known(metadata_partition)
        try:
            offset = await owned.producer.commit(to_write, owned.assignment.member, timeout_ms)
            await self._follower.read_past(metadata_partition, offset, before, timeout_ms)
        except OwnershipLostError as error:
            logger.warning(
                "this process lost the ownership of a metadata partition",
                extra={"metadata_partition": metadata_partition, "error": str(error)},
            )
            self._give_up(metadata_partition, owned)
            if self._assignment is owned.assignment:
                self._membership.rejoin()
            raise
        except BaseException:
            # Also after a cancellation: the end of the transaction is unknown until the producer is initialized.
            self._give_up(metadata_partition, owned)
            self._start_takeover(owned.assignment, metadata_partition)
            raise

    def _give_up(self, metadata_partition: int, owned: _OwnedPartition) -> None:
        if self._owned.get(metadata_partition) is owned:
            del self._owned[metadata_partition]

    def _on_assigned(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._tenures.assigned(assignment)
        logger.info(
            "metadata partitions were assigned",
            extra={
                "generation_id": assignment.member.generation_id,
                "metadata_partitions": sorted(assignment.metadata_partitions),
            },
        )
        for metadata_partition in sorted(assignment.metadata_partitions):
            self._start_takeover(assignment, metadata_partition)

    def _on_revoked(self) -> None:
        self._assignment = None
        self._owned.clear()
        for takeover in self._takeovers:
            takeover.cancel()

    def _start_takeover(self, assignment: Assignment, metadata_partition: int) -> None:
        if self._assignment is not assignment or self._tasks is None:
            return
        takeover = self._tasks.create_task(
            self._take_over(assignment, metadata_partition), name=f"take-over-{metadata_partition}"
        )
        self._takeovers.add(takeover)
        takeover.add_done_callback(self._takeovers.discard)

    async def _take_over(self, assignment: Assignment, metadata_partition: int) -> None:
        failures = 0
        while self._assignment is assignment:
            try:
                async with self._slots:
                    producer = await self._caught_up_producer(metadata_partition)
            except OwnershipLostError:
                self._membership.rejoin()
                return
            except RemoteLogMetadataError as error:
                logger.warning(
                    "this process cannot take over a metadata partition yet",
                    extra={"metadata_partition": metadata_partition, "error": str(error)},
                )
            else:
                if self._assignment is assignment:
                    self._owned[metadata_partition] = _OwnedPartition(producer, assignment)
                    self._tenures.owned(metadata_partition, assignment.member)
                return
            failures += 1
            await asyncio.sleep(_BACKOFF.pause_ms(failures) / 1000)

    async def _caught_up_producer(self, metadata_partition: int) -> TransactionalProducer:
        # Checked when the takeover's turn has come, since the membership may have ended during a long wait.
        if not self._is_confirmed():
            raise RemoteLogMetadataNotReadyError("the group has not confirmed this member's generation recently")
        producer = self._producer(metadata_partition, f"{self._group_id}-{metadata_partition}")
        await producer.initialize(_INITIALIZE_TIMEOUT_MS)
        try:
            await self._follower.ensure_fresh(metadata_partition, 0, _HELD_BACK_AFTER_MS)
        except RemoteLogMetadataNotReadyError:
            # A process that died while it wrote tier settings left an open transaction. Readers wait behind it until
            # its timeout, and until the coordinator looks for timeouts. This fences a live writer, which tries again.
            name = in_turn_transactional_id(self._group_id, metadata_partition)
            tier_configs = self._producer(metadata_partition, name)
            await tier_configs.initialize(_INITIALIZE_TIMEOUT_MS)
            for one in (producer, tier_configs):
                await one.abort_forgotten(_INITIALIZE_TIMEOUT_MS)
            await self._follower.ensure_fresh(metadata_partition, 0, _READ_TIMEOUT_MS)
        return producer

    def _producer(self, metadata_partition: int, transactional_id: str) -> TransactionalProducer:
        return TransactionalProducer(
            self._client, self._topic, metadata_partition, transactional_id, clock_skew=self._clock_skew
        )
