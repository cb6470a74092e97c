"""`MetadataPartitionOwnership` in a group whose generations a test decides, over producers that only count."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.support.tiers.waiting import until
from tiers.errors import OwnershipLostError, RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import KeyAndValue, RecordType, known_record_types
from tiers.metadata.topic.group import ownership as ownership_module
from tiers.metadata.topic.group.membership import Assignment, GroupMembership
from tiers.metadata.topic.group.ownership import MetadataPartitionOwnership
from tiers.metadata.topic.metadata_producer import GroupMember
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.log_start import OffsetAndEpoch

TOPIC = MetadataTopic("cluster", "__remote_log_metadata", UUID(int=99), 20)


class Group:
    """The group as one member sees it. `committed` has the generation of each commit."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.committed: list[int] = []
        self.refused_generations: set[int] = set()
        self.initialized: list[str] = []
        """The transactional ids, in the order in which they were initialized."""
        self.aborted: list[str] = []
        self.go_on = asyncio.Event()
        """Until it is set, no producer is initialized."""
        self.go_on.set()
        self.held_back_by: str | None = None
        """Nothing is read to its end until this transactional id is initialized."""
        self.forgotten: str | None = None
        """Nothing is read to its end until this transactional id has ended what its coordinator has forgotten."""
        self.fresh_at_ms: int | None = 0
        self.reading = 0
        self.owner: MetadataPartitionOwnership | None = None
        self._generation = 0

    @property
    def owning(self) -> MetadataPartitionOwnership:
        assert self.owner is not None
        return self.owner

    def assign(
        self,
        partitions: Collection[int],
        generation: int | None = None,
        member: str = "me",
        record_types: frozenset[RecordType] | None = None,
    ) -> None:
        """A generation begins. By default it is the next one, and all members read all records."""
        self._generation = self._generation + 1 if generation is None else generation
        membership, known = self.owning._membership, known_record_types() if record_types is None else record_types
        membership._confirmed_at_ms = self.now_ms
        member_of = GroupMember("group", self._generation, member)
        membership._on_assigned(Assignment(member_of, frozenset(partitions), known))

    def revoke(self) -> None:
        self.owning._membership._confirmed_at_ms = None
        self.owning._membership._on_revoked()

    def beat(self) -> None:
        self.owning._membership._confirmed_at_ms = self.now_ms

    async def owns(self, number: int) -> None:
        await until(lambda: self.owning.owns(number))


class _Follower:
    def __init__(self, group: Group) -> None:
        self._group = group

    def fresh_at_ms(self, number: int) -> int | None:
        return self._group.fresh_at_ms

    def reading(self) -> int:
        return self._group.reading

    def known(self, number: int) -> OffsetAndEpoch:
        return OffsetAndEpoch(0, 0)

    async def read_past(self, number: int, offset: int, before: OffsetAndEpoch, timeout_ms: int) -> None:
        return

    async def ensure_fresh(self, number: int, max_age_ms: int, timeout_ms: int) -> None:
        group = self._group
        is_open = group.held_back_by not in (None, *group.initialized) or group.forgotten not in (None, *group.aborted)
        if is_open:
            raise RemoteLogMetadataNotReadyError("a transaction is open")


@asynccontextmanager
async def group_of_one(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Group]:
    group = Group()

    class Producer:
        def __init__(self, client: object, topic: object, number: int, name: str, **_: object) -> None:
            self.name = name

        async def initialize(self, timeout_ms: int) -> None:
            group.initialized.append(self.name)
            await group.go_on.wait()

        async def abort_forgotten(self, timeout_ms: int) -> None:
            assert self.name in group.initialized
            group.aborted.append(self.name)

        async def commit(self, records: Sequence[KeyAndValue], member: GroupMember, timeout_ms: int) -> int:
            if member.generation_id in group.refused_generations:
                raise OwnershipLostError("the generation has ended")
            group.committed.append(member.generation_id)
            return len(group.committed)

    async def stay(self: GroupMembership) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(GroupMembership, "run", stay)
    monkeypatch.setattr(ownership_module, "TransactionalProducer", Producer)
    nothing: Any = None
    follower: Any = _Follower(group)
    group.owner = MetadataPartitionOwnership(
        nothing,
        TOPIC,
        follower,
        TopicBasedSettings(Path()),
        clock_ms=lambda: group.now_ms,
        clock_skew=nothing,
    )
    running = asyncio.create_task(group.owner.run())
    await until(lambda: group.owning._tasks is not None)
    try:
        yield group
    finally:
        running.cancel()
        await asyncio.wait([running])
