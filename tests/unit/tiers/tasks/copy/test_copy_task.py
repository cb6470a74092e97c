from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import threading
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.proxy.parsed_config import parse_config
from tests.support.tiers.attempts import batches
from tests.support.tiers.interposed import after, refuse
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.tier_config import ConfigError
from tiers.errors import (
    BrokerError,
    CorruptSegmentError,
    CustomMetadataTooLargeError,
    RetriableRemoteStorageError,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.quota import QuotaWindow, RateQuota
from tiers.segment.segment_builder import SegmentBuilder
from tiers.tasks.copy import segment_copy
from tiers.tasks.copy.copy_task import RLMCopyTask
from tiers.tasks.copy.spool import Spool, SpoolError

UPSTREAM = '[upstream]\nbootstrap.servers = "a:9092"\n'


@pytest.mark.parametrize(
    "answer", ["the next records are gone", "another leader", "the last stable offset", "no answer", "all records"]
)
async def test_records_that_the_broker_removes_meanwhile_are_copied(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, answer: str
) -> None:
    """The broker removes 0 to 9 after they were read, so the owner has the last copy."""
    read, log = bench.log.read, bench.log

    async def removing(partition: TopicIdPartition, offset: int, *args: int) -> LogRead:
        if offset == 20:
            log.log_start_offset = 30 if answer == "the next records are gone" else 10
            log.leader_epoch += answer == "another leader"
            log.last_stable_offset = 20 if answer == "the last stable offset" else None
            if answer == "no answer":
                raise BrokerError("the connection was reset", retriable=True)
        return await read(partition, offset, *args)

    log.append(*batches(0, 100))
    policy = replace(POLICY, segment_bytes=2_500)
    monkeypatch.setattr(log, "read", removing)
    await bench.copy(policy)
    assert bench.finished == [(0, 29 if answer == "all records" else 19)]
    assert bench.spooled() == []


async def test_a_store_that_damages_each_copy_gets_the_next_one_later_and_later(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged objects are deleted."""
    copied_ms = []

    def damage(segment: RemoteLogSegmentMetadata, _: object) -> None:
        copied_ms.append(bench.now_ms)
        path = next((bench.folder / "remote").rglob(f"*{segment.segment_id.id}.indexes"))
        path.write_bytes(path.read_bytes()[:-10])

    bench.log.append(*batches(0, 30))
    await bench.check_facts()
    after(monkeypatch, bench.store, "copy_log_segment_data", damage)
    for _ in range(120):
        with suppress(CorruptSegmentError, RetriableRemoteStorageError):
            await bench.copy()
        bench.now_ms += 30_000
    pauses_ms = [after - before for before, after in pairwise(copied_ms)]
    assert pauses_ms == sorted(pauses_ms)
    assert pauses_ms[1] <= 120_000
    assert pauses_ms[-1] > 4 * pauses_ms[0]
    assert len(bench.segments) == len(bench.services.spool.kept()) == 1


@pytest.mark.parametrize("step", ["made", "appended"])
async def test_a_copy_that_is_cancelled_while_a_file_is_written_leaves_nothing(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    reached, go_on = threading.Event(), threading.Event()

    class Slow(SegmentBuilder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if step == "made":
                reached.set()
                go_on.wait(60)

        def append(self, *args: Any) -> None:
            super().append(*args)
            reached.set()
            go_on.wait(60)

    monkeypatch.setattr(segment_copy, "SegmentBuilder", Slow)
    bench.log.append(*batches(0, 40))
    copying = asyncio.create_task(bench.copy())
    await asyncio.to_thread(reached.wait, 20)
    copying.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert bench.spooled() == []


async def test_a_full_disk_ends_the_read_early_and_loses_nothing(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, full = SegmentBuilder.append, [True]

    def fails_once(builder: SegmentBuilder, *args: Any) -> None:
        if builder.size_bytes and full:
            full.clear()
            raise OSError(errno.ENOSPC, "No space left on device")
        append(builder, *args)

    monkeypatch.setattr(SegmentBuilder, "append", fails_once)
    bench.log.append(*batches(0, 50))
    await bench.copy_all()
    assert bench.finished == [(0, 9), (10, 39)]
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 39)


async def test_a_disk_with_little_room_gets_small_segments(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append(*batches(0, 60))
    free_bytes = 3 * len(bench.log.bytes_of(0, 19))
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free_bytes))
    await bench.copy_all()
    assert bench.finished == [(0, 19), (20, 39)]


async def test_a_full_spool_ends_no_copy_that_cannot_wait(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append(*batches(0, 40))
    monkeypatch.setattr(Spool, "is_full", True)
    with pytest.raises(SpoolError):
        await bench.copy()
    assert bench.finished == []
    await bench.copy_task.run(POLICY, await bench.survey(), 0, retention_share=0.4)
    assert [each.metadata.start_offset for each in bench.services.spool.kept_in(PARTITION)] == [0, 30]


def let_the_store_return(custom_metadata: bytes, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = bench.store.copy_log_segment_data

    async def copy_and_return(*args: object) -> bytes:
        await copy(*args)  # type: ignore[arg-type]  # handed through
        return custom_metadata

    monkeypatch.setattr(bench.store, "copy_log_segment_data", copy_and_return)


async def test_custom_metadata_above_the_limit_ends_the_copy(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.log.append(*batches(0, 40))
    with monkeypatch.context() as patched:
        let_the_store_return(b"x" * 129, bench, patched)
        with pytest.raises(CustomMetadataTooLargeError):
            await bench.copy()
    assert bench.segments == []
    assert await bench.objects() == []
    remote_log = bench.services.settings.remote_log.model_copy(update={"custom_metadata_max_bytes": 129})
    bench.services = replace(bench.services, settings=replace(bench.services.settings, remote_log=remote_log))
    bench.restart()
    with monkeypatch.context() as patched:
        let_the_store_return(b"x" * 129, bench, patched)
        await bench.copy()
    assert bench.finished == [(0, 29)]
    assert bench.segments[0].custom_metadata == b"x" * 129


async def test_too_long_custom_metadata_goes_to_the_store_alone_for_deletion(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may need it to find the objects (KIP-917)."""
    bench.log.append(*batches(0, 40))
    let_the_store_return(b"x" * 129, bench, monkeypatch)
    told = refuse(monkeypatch, bench.store, "delete_log_segment_data")
    with pytest.raises(CustomMetadataTooLargeError):
        await bench.copy()
    assert [segment.custom_metadata for segment in told] == [b"x" * 129]
    assert [(one.state.name, one.custom_metadata) for one in bench.segments] == [("DELETE_SEGMENT_STARTED", None)]


@pytest.mark.parametrize(("value", "is_valid"), [(-1, False), (0, True), (2**31 - 1, True), (2**31, False)])
def test_the_limit_has_the_range_of_kafkas_key(value: int, is_valid: bool) -> None:
    text = f"remote.log.metadata.custom.metadata.max.bytes = {value}\n{UPSTREAM}"
    with contextlib.nullcontext() if is_valid else pytest.raises(ConfigError, match=r"custom\.metadata\.max\.bytes"):
        assert parse_config(text).remote_log.custom_metadata_max_bytes == value


@pytest.mark.parametrize(
    ("limit_bytes", "weight", "is_valid"), [(13, 1, True), (12, 1, False), (12, 0, True), (0, 1, False)]
)
def test_a_location_whose_name_does_not_fit_is_refused(limit_bytes: int, weight: int, is_valid: bool) -> None:
    text = f"""
        remote.log.metadata.custom.metadata.max.bytes = {limit_bytes}
        {UPSTREAM}
        [storage]
        implementation = "local"
        path = "/tier"
        [[storage.locations]]
        name = "archive"
        path = "/archive"
        weight = {weight}
    """
    message = (
        r"custom\.metadata\.max\.bytes is \d+, but the location 'archive' takes 13 bytes .*: set it to at least 13"
    )
    with contextlib.nullcontext() if is_valid else pytest.raises(ConfigError, match=message):
        assert parse_config(text).storage is not None


@pytest.fixture
def quota(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> RateQuota:
    """400 bytes in any second, and a read has more. Who sleeps lets the time pass."""

    async def sleep(seconds: float) -> None:
        bench.now_ms += int(1000 * seconds)

    monkeypatch.setattr("tiers.tasks.copy.copy_task.asyncio.sleep", sleep)
    quota = RateQuota(400, QuotaWindow(1, 1000), lambda: bench.now_ms)
    bench.services = replace(bench.services, copy_quota=quota)
    bench.restart()
    bench.log.append(*batches(0, 100))
    return quota


async def test_a_copy_that_has_begun_waits_for_the_quota(bench: Workbench, quota: RateQuota) -> None:
    began_ms, size_bytes = bench.now_ms, len(bench.log.bytes_of(0, 89))
    while bench.finished != [(0, 29), (30, 59), (60, 89)]:
        bench.now_ms += bench.copy_task.throttled_ms
        await bench.copy()
    assert await bench.remote_bytes() == bench.log.bytes_of(0, 89)
    # A sample counts until the window has passed behind it, so every read waits for two seconds.
    assert bench.now_ms - began_ms >= 2_000 * (size_bytes // bench.services.settings.fetch_bytes)
    assert bench.log.reads.count(10) <= 1, "what was read is kept meanwhile"
    assert bench.metric("remote_copy_throttle_time_seconds_count") >= 2


async def test_a_read_that_fails_uses_nothing_up(bench: Workbench, quota: RateQuota) -> None:
    bounds = await bench.survey()
    bench.log.failure = BrokerError("no leader", retriable=True)
    for _ in range(10):
        with pytest.raises(BrokerError):
            await bench.copy_task.run(POLICY, bounds, 0)
    assert quota.throttle_ms() == 0


async def test_no_copy_begins_while_the_quota_is_used_up(bench: Workbench, quota: RateQuota) -> None:
    assert quota.reserve(1000) is not None
    other = RLMCopyTask(bench.services, PARTITION, bench.attempts, bench.facts_task)
    bounds = await bench.survey()
    other.uncopied.survey(await bench.log.size_bytes(PARTITION, 1000), bounds)
    for task in (bench.copy_task, other):
        assert not await task.run(POLICY, bounds, 0)
        assert task.throttled_ms == 2000
    assert (bench.finished, bench.spooled()) == ([], [])
