"""`MetadataPartitionOwnership`: the members that may not begin to write, and their requests before that."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from tests.support.tiers.metadata_state import gap, segment
from tiers.errors import OwnershipLostError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import LOG_GAP_API_KEY, RecordType, key_and_value, known_record_types
from tiers.metadata.topic.group import ownership as ownership_module
from tiers.metadata.topic.group.membership import Assignment, GroupMembership, MembershipSettings
from tiers.metadata.topic.group.ownership import MetadataPartitionOwnership
from tiers.metadata.topic.metadata_producer import GroupMember
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.model.log_start import OffsetAndEpoch

TOPIC = MetadataTopic("cluster", "__remote_log_metadata", UUID(int=99), 20, 86_400_000)


class Producer:
    """Counts the initialized producers. The first ones wait until the test releases them."""

    initialized: list[int]
    go_on: asyncio.Event

    names: list[str]
    aborted: list[str]

    def __init__(self, client: object, topic: object, metadata_partition: int, name: str, **_: object) -> None:
        self.metadata_partition = metadata_partition
        self.name = name

    async def initialize(self, timeout_ms: int) -> None:
        Producer.initialized.append(self.metadata_partition)
        Producer.names.append(self.name)
        await Producer.go_on.wait()

    async def abort_forgotten(self, timeout_ms: int) -> None:
        assert self.name in Producer.names
        Producer.aborted.append(self.name)


class Follower:
    """With `held_back_by`, nothing is read to its end until that transactional id is initialized; with `forgotten`,
    until it has ended what its coordinator has forgotten."""

    held_back_by: str | None = None
    forgotten: str | None = None
    read_at_ms: int | None = 0

    def fresh_at_ms(self, metadata_partition: int) -> int | None:
        return self.read_at_ms

    def known(self, metadata_partition: int) -> OffsetAndEpoch:
        return OffsetAndEpoch(0, 0)

    async def read_past(self, metadata_partition: int, offset: int, before: OffsetAndEpoch, timeout_ms: int) -> None:
        return

    async def ensure_fresh(self, metadata_partition: int, max_age_ms: int, timeout_ms: int) -> None:
        if self.held_back_by is not None and self.held_back_by not in Producer.names:
            raise RemoteLogMetadataNotReadyError("a transaction is open")
        if self.forgotten is not None and self.forgotten not in Producer.aborted:
            raise RemoteLogMetadataNotReadyError("a transaction is open")


async def test_a_member_that_waited_too_long_fences_no_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ms = 1_000
    joined = asyncio.Event()

    async def stay(self: GroupMembership) -> None:
        self._confirmed_at_ms = now_ms
        self._on_assigned(Assignment(GroupMember("group", 1, "me"), frozenset(range(20)), frozenset()))
        joined.set()
        await asyncio.Event().wait()

    Producer.initialized, Producer.names, Producer.aborted, Producer.go_on = [], [], [], asyncio.Event()
    monkeypatch.setattr(GroupMembership, "run", stay)
    monkeypatch.setattr(ownership_module, "TransactionalProducer", Producer)
    nobody: Any = None
    follower: Any = Follower()
    owner = MetadataPartitionOwnership(
        nobody,
        TOPIC,
        follower,
        MembershipSettings("group"),
        transactional_id_prefix="tidegate",
        clock_ms=lambda: now_ms,
        jitter=lambda: 0.0,
    )
    running = asyncio.create_task(owner.run())
    try:
        await joined.wait()
        async with asyncio.timeout(60):
            while len(Producer.initialized) < ownership_module._TAKEOVERS_AT_ONCE:  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)
        now_ms += ownership_module.CONFIRMATION_MAX_AGE_MS + 1
        Producer.go_on.set()
        async with asyncio.timeout(60):
            while len(owner._owned) < len(Producer.initialized):  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)
        await asyncio.sleep(0)
        assert len(Producer.initialized) == ownership_module._TAKEOVERS_AT_ONCE
        assert owner.owned() == frozenset()
        with pytest.raises(OwnershipLostError):
            await owner.write(Producer.initialized[0], list, 20)
    finally:
        running.cancel()
        await asyncio.wait([running])


OWN, TIER_CONFIGS = "tidegate-0", "tidegate-tier-configs-0"


@pytest.mark.parametrize(
    ("held_back_by", "forgotten", "aborted"),
    [
        (None, None, []),
        (TIER_CONFIGS, None, [OWN, TIER_CONFIGS]),
        (None, OWN, [OWN, TIER_CONFIGS]),
        (None, TIER_CONFIGS, [OWN, TIER_CONFIGS]),
    ],
)
async def test_a_transaction_that_holds_back_the_reading_is_ended_and_no_other(
    monkeypatch: pytest.MonkeyPatch, held_back_by: str | None, forgotten: str | None, aborted: list[str]
) -> None:
    joined = asyncio.Event()

    async def stay(self: GroupMembership) -> None:
        self._confirmed_at_ms = 0
        self._on_assigned(Assignment(GroupMember("group", 1, "me"), frozenset({0}), frozenset()))
        joined.set()
        await asyncio.Event().wait()

    Producer.initialized, Producer.names, Producer.aborted, Producer.go_on = [], [], [], asyncio.Event()
    Producer.go_on.set()
    monkeypatch.setattr(GroupMembership, "run", stay)
    monkeypatch.setattr(ownership_module, "TransactionalProducer", Producer)
    nobody: Any = None
    follower: Any = Follower()
    follower.held_back_by, follower.forgotten = held_back_by, forgotten
    owner = MetadataPartitionOwnership(
        nobody,
        TOPIC,
        follower,
        MembershipSettings("group"),
        transactional_id_prefix="tidegate",
        clock_ms=lambda: 0,
        jitter=lambda: 0.0,
    )
    running = asyncio.create_task(owner.run())
    try:
        await joined.wait()
        async with asyncio.timeout(60):
            while not owner.owned():  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)
        assert Producer.names == ([OWN, TIER_CONFIGS] if aborted else [OWN])
        assert Producer.aborted == aborted
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_nothing_is_owned_while_the_state_is_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async def stay(self: GroupMembership) -> None:
        self._confirmed_at_ms = 0
        self._on_assigned(Assignment(GroupMember("group", 1, "me"), frozenset({0}), frozenset()))
        await asyncio.Event().wait()

    Producer.initialized, Producer.names, Producer.aborted, Producer.go_on = [], [], [], asyncio.Event()
    Producer.go_on.set()
    monkeypatch.setattr(GroupMembership, "run", stay)
    monkeypatch.setattr(ownership_module, "TransactionalProducer", Producer)
    nobody: Any = None
    follower: Any = Follower()
    owner = MetadataPartitionOwnership(
        nobody,
        TOPIC,
        follower,
        MembershipSettings("group"),
        transactional_id_prefix="tidegate",
        clock_ms=lambda: 0,
        jitter=lambda: 0.0,
    )
    running = asyncio.create_task(owner.run())
    try:
        async with asyncio.timeout(60):
            while not owner.owned():  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)
        follower.read_at_ms = None
        assert not owner.owns(0)
        with pytest.raises(OwnershipLostError):
            await owner.write(0, list, 1_000)
        follower.read_at_ms = 1
        assert owner.owns(0)
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize("is_over", [False, True])
async def test_an_owner_that_was_paused_writes_after_its_next_heartbeat(
    monkeypatch: pytest.MonkeyPatch, is_over: bool
) -> None:
    now_ms, beat = 1_000, asyncio.Event()
    written: list[int] = []

    async def stay(self: GroupMembership) -> None:
        self._confirmed_at_ms = now_ms
        self._on_assigned(Assignment(GroupMember("group", 1, "me"), frozenset({0}), frozenset()))
        await beat.wait()
        if is_over:
            self._on_revoked()
        self._confirmed_at_ms = now_ms
        await asyncio.Event().wait()

    async def commit(self: Producer, *_: object) -> int:
        written.append(now_ms)
        return 7

    Producer.initialized, Producer.names, Producer.aborted, Producer.go_on = [], [], [], asyncio.Event()
    Producer.go_on.set()
    monkeypatch.setattr(GroupMembership, "run", stay)
    monkeypatch.setattr(Producer, "commit", commit, raising=False)
    monkeypatch.setattr(ownership_module, "TransactionalProducer", Producer)
    monkeypatch.setattr(ownership_module, "CONFIRMATION_MAX_AGE_MS", 60_000)
    nobody: Any = None
    follower: Any = Follower()
    owner = MetadataPartitionOwnership(
        nobody,
        TOPIC,
        follower,
        MembershipSettings("group"),
        transactional_id_prefix="tidegate",
        clock_ms=lambda: now_ms,
        jitter=lambda: 0.0,
    )
    running = asyncio.create_task(owner.run())
    try:
        async with asyncio.timeout(60):
            while not owner.owned():  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)
        now_ms += 60_001
        writing = asyncio.create_task(owner.write(0, list, 60_000))
        await asyncio.sleep(0)
        assert not owner.owns(0)
        assert (writing.done(), written) == (False, [])
        beat.set()
        if is_over:
            with pytest.raises(OwnershipLostError):
                await writing
        else:
            await writing
        assert written == ([] if is_over else [now_ms])
    finally:
        running.cancel()
        await asyncio.wait([running])


@pytest.mark.parametrize(
    ("read_by_all", "is_written"),
    [(known_record_types(), True), (known_record_types() - {RecordType(LOG_GAP_API_KEY, 0)}, False)],
)
async def test_an_owner_writes_no_required_record_that_a_member_cannot_read(
    monkeypatch: pytest.MonkeyPatch, read_by_all: frozenset[RecordType], is_written: bool
) -> None:
    committed: list[int] = []

    async def stay(self: GroupMembership) -> None:
        self._confirmed_at_ms = 0
        member = GroupMember("group", 1, "me")
        self._on_assigned(Assignment(member, frozenset({0}), read_by_all))
        await asyncio.Event().wait()

    async def commit(self: Producer, records: list[object], *_: object) -> int:
        committed.append(len(records))
        return 7

    Producer.initialized, Producer.names, Producer.aborted, Producer.go_on = [], [], [], asyncio.Event()
    Producer.go_on.set()
    monkeypatch.setattr(GroupMembership, "run", stay)
    monkeypatch.setattr(Producer, "commit", commit, raising=False)
    monkeypatch.setattr(ownership_module, "TransactionalProducer", Producer)
    nobody: Any = None
    follower: Any = Follower()
    owner = MetadataPartitionOwnership(
        nobody,
        TOPIC,
        follower,
        MembershipSettings("group"),
        transactional_id_prefix="tidegate",
        clock_ms=lambda: 0,
        jitter=lambda: 0.0,
    )
    running = asyncio.create_task(owner.run())
    try:
        async with asyncio.timeout(60):
            while not owner.owned():  # noqa: ASYNC110  # no event says so
                await asyncio.sleep(0.001)
        added, lost = key_and_value(segment(1, 0, 9)), key_and_value(gap(10, 20))
        if is_written:
            await owner.write(0, lambda: [added, lost], 1_000)
        else:
            with pytest.raises(RemoteLogMetadataError, match="records of api key 1006 yet"):
                await owner.write(0, lambda: [added, lost], 1_000)
        assert owner.owns(0)
        await owner.write(0, lambda: [added], 1_000)
        assert committed == ([2, 1] if is_written else [1])
    finally:
        running.cancel()
        await asyncio.wait([running])
