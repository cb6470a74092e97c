"""A store that refuses, stalls, truncates or does not show what it has, under the RLM tasks and under readers.

Copying, trimming and expiry wait and go on by themselves; nothing is deleted that has no DELETE record, nothing is
believed that was not read back; readers are told to try again, and get their bytes later.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from proxy.error_map import fetch_error
from tests.support.fakes.lying_store import Lie, LyingStore
from tests.support.fakes.tier_process import PARTITION
from tests.support.tiers.partition_life import RETRIED_AFTER_MS, STEPS, Life
from tiers.errors import RemoteLogError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteReadRequest, monotonic_ms
from tiers.storage.remote_storage_manager import RemoteStorageManager

COPYING, TRIMMING, EXPIRING = range(3)
"""Places in `STEPS`."""
STRANGERS = ("x/cluster/topic/0/unknown.log", "stray.indexes")


class LyingLife(Life):
    def __init__(self, folder: Path) -> None:
        self.stores: list[LyingStore] = []
        super().__init__(folder)
        for name in STRANGERS:
            path = folder / "remote" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"somebody's")

    def wrap_store(self, store: RemoteStorageManager) -> RemoteStorageManager:
        self.stores.append(LyingStore(store))
        self.stores[-1].is_named = self.is_named
        return self.stores[-1]

    def is_named(self, segment_id: RemoteLogSegmentId) -> bool:
        known = self.process.state.remote_log_segment_metadata_by_id(segment_id)
        return known is not None and known.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED

    @property
    def store(self) -> LyingStore:
        return self.stores[-1]

    async def live_until(self, step: int) -> None:
        """All of the life before that step."""
        for policy in STEPS[:step]:
            self.topics.policy = policy
            while await self.process.manager.round():
                pass
            self.clock.advance(RETRIED_AFTER_MS)

    async def some_rounds(self, step: int) -> None:
        self.topics.policy = STEPS[step]
        for _ in range(4):
            with contextlib.suppress(RemoteLogError):
                await self.process.manager.round()
            self.clock.advance(RETRIED_AFTER_MS)


@asynccontextmanager
async def lived(folder: Path, step: int) -> AsyncIterator[LyingLife]:
    life = LyingLife(folder)
    await life.process.open()
    try:
        await life.live_until(step)
        yield life
    finally:
        await life.process.end()


@pytest.mark.parametrize("step", [COPYING, EXPIRING], ids=["copying", "expiring"])
@pytest.mark.parametrize("lie", Lie, ids=lambda each: each.value)
async def test_the_tasks_wait_and_go_on(lie: Lie, step: int, tmp_path: Path) -> None:
    async with lived(tmp_path, step) as life:
        start_before = life.log.log_start_offset
        life.store.lie = lie
        await life.some_rounds(step)
        assert life.store.lies_told > 0 or (lie, step) == (Lie.FORGETS, EXPIRING)
        if step == COPYING:
            assert life.process.state.remote_end_offset(PARTITION) is None
            assert life.log.log_start_offset == start_before == 0
        life.store.lie = None
        await life.check_what_is_readable()
        for _ in range(3):
            await life.some_rounds(step)
        await life.live()
        await life.live()
        for store in life.stores:
            assert all(deletion.was_named for deletion in store.deletions)
        await life.check_the_end(strangers=set(STRANGERS))


REFUSALS = {Lie.REFUSES: ErrorCode.NONE, Lie.STALLS: ErrorCode.NONE}
"""The lies that an honest store in trouble tells, too. They are an answer without records."""


@pytest.mark.parametrize("lie", Lie, ids=lambda each: each.value)
async def test_readers_try_again_and_are_served_later(lie: Lie, tmp_path: Path) -> None:
    async with lived(tmp_path, EXPIRING) as life, life.process.reader() as reader:
        assert life.log.log_start_offset > 0
        life.store.lie = lie
        for _ in range(3):
            # Never OFFSET_OUT_OF_RANGE: it would make consumers jump.
            expected = REFUSALS.get(lie, ErrorCode.REPLICA_NOT_AVAILABLE)
            assert await refusal(reader, expected) is expected
        assert life.store.lies_told > 0
        life.store.lie = None
        await life.model.read_all(reader, 0, life.log.log_start_offset)


async def test_an_object_that_shrinks_during_a_read_is_never_served(tmp_path: Path) -> None:
    async with lived(tmp_path, EXPIRING) as life, life.process.reader() as reader:
        segment = life.process.state.remote_log_segment_metadata(PARTITION, 0)
        assert segment is not None
        await reader.index(segment, deadline_ms=monotonic_ms() + 20_000, connection_id=1)
        life.store.lie = Lie.TRUNCATES
        with pytest.raises(RemoteLogError) as raised:
            await read(reader, timeout_ms=20_000)
        assert fetch_error(raised.value) is ErrorCode.REPLICA_NOT_AVAILABLE
        life.store.lie = None
        await life.model.read_all(reader, 0, segment.end_offset + 1)


async def refusal(reader: RemoteLogReader, expected: ErrorCode) -> ErrorCode:
    """Returns the answer to a client.

    If the time is over before the store's first answer, on a busy machine, the client asks again with more time. It
    does not if it expects that the time is over."""
    for timeout_ms in (200, 2_000, 20_000):
        with pytest.raises(RemoteLogError) as raised:
            await read(reader, timeout_ms)
        code = fetch_error(raised.value)
        if code is not ErrorCode.NONE or code is expected:
            break
    return code


async def read(reader: RemoteLogReader, timeout_ms: int) -> None:
    await reader.read(
        RemoteReadRequest(
            PARTITION,
            0,
            100_000,
            min_one_message=True,
            isolation_level=1,
            deadline_ms=monotonic_ms() + timeout_ms,
            connection_id=1,
        )
    )
