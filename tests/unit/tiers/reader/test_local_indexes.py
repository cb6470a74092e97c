"""The local index files on the way of a read."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.records.record_batch import iterate_batches
from tests.support.fakes.local_indexes import contents, expected, segment_object
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.reader.local_index_cache import LocalIndexCache, LocalIndexes
from tiers.reader.remote_log_reader import READ_COMMITTED, RemoteLogReader, RemoteReadRequest, monotonic_ms
from tiers.segment.indexes.local_index_files import LOG_INDEX, append_to

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(tmp_path)


@pytest.fixture
def fetched(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Start offsets of the segments whose indexes the store was asked for."""
    asked: list[int] = []
    fetch = tier.storage.fetch_indexes

    async def counted(metadata: object) -> bytes:
        asked.append(metadata.start_offset)  # type: ignore[attr-defined]  # a segment's metadata
        return await fetch(metadata)  # type: ignore[arg-type]  # handed through

    monkeypatch.setattr(tier.storage, "fetch_indexes", counted)
    return asked


def local_indexes(folder: Path) -> LocalIndexes:
    cache = LocalIndexCache(folder / "index", RemoteLogConfig(), monotonic_ms)
    return LocalIndexes(cache, deadline_ms=60_000)


async def read_all(tier: RemoteTier, local: LocalIndexes, end: int) -> tuple[bytes, set[AbortedTransaction]]:
    records, aborted, offset = b"", set[AbortedTransaction](), 0
    async with RemoteLogReader(tier.rlmm, tier.storage, local_indexes=local) as reader:
        while offset < end:
            answer = await reader.read(
                RemoteReadRequest(
                    P0,
                    offset,
                    100_000,
                    min_one_message=True,
                    isolation_level=READ_COMMITTED,
                    deadline_ms=monotonic_ms() + 20_000,
                    connection_id=1,
                )
            )
            for view in answer.records:
                records += view
                *_, last = iterate_batches(view)
                offset = last.next_offset
            aborted |= set(answer.aborted_transactions or ())
    return records, aborted


async def test_after_a_restart_nothing_is_fetched_but_records(
    tier: RemoteTier, fetched: list[int], tmp_path: Path
) -> None:
    made = await tier.fill(P0, segments=3, batches=4)
    first = local_indexes(tmp_path)
    expected_records = b"".join(made)
    assert (await read_all(tier, first, 120))[0] == expected_records
    assert sorted(fetched) == [0, 40, 80]
    assert (first.hits, first.misses) == (0, 3)

    fetched.clear()
    second = local_indexes(tmp_path)
    assert (await read_all(tier, second, 120))[0] == expected_records
    assert fetched == []
    assert (second.hits, second.misses) == (3, 0)


async def test_aborted_transactions_and_leader_epochs_are_known_from_the_files(
    tier: RemoteTier, fetched: list[int], tmp_path: Path
) -> None:
    await tier.add(P0, [batch_of(0, 10), batch_of(10, 10)], 0, [AbortedTransaction(7, 3)])
    before = await read_all(tier, local_indexes(tmp_path), 20)
    fetched.clear()
    local = local_indexes(tmp_path)
    assert await read_all(tier, local, 20) == before
    assert before[1] == {AbortedTransaction(7, 3)}
    async with RemoteLogReader(tier.rlmm, tier.storage, local_indexes=local_indexes(tmp_path)) as reader:
        epochs = await reader.leader_epochs(P0, deadline_ms=monotonic_ms() + 20_000, connection_id=1)
    assert [(one.epoch, one.start_offset) for one in epochs] == [(0, 0)]
    assert fetched == []


async def test_damaged_files_cost_a_get_and_are_made_again(
    tier: RemoteTier, fetched: list[int], tmp_path: Path
) -> None:
    made = await tier.fill(P0, segments=1, batches=4)
    await read_all(tier, local_indexes(tmp_path), 40)
    (path,) = (tmp_path / "index").glob(f"*/*{LOG_INDEX}")
    path.write_bytes(path.read_bytes()[::-1])
    fetched.clear()
    assert (await read_all(tier, local_indexes(tmp_path), 40))[0] == b"".join(made)
    assert fetched == [0]
    assert (await read_all(tier, local_indexes(tmp_path), 40))[0] == b"".join(made)
    assert fetched == [0]


def until(go_on: threading.Event, begun: threading.Event) -> Callable[[Path, bytes], None]:
    def append(path: Path, content: bytes) -> None:
        begun.set()
        assert go_on.wait(60)
        append_to(path, content)

    return append


async def test_a_stuck_disk_holds_nothing_up(tmp_path: Path) -> None:
    go_on, begun = threading.Event(), threading.Event()
    cache = LocalIndexCache(tmp_path / "index", RemoteLogConfig(), monotonic_ms, append=until(go_on, begun))
    local = LocalIndexes(cache, deadline_ms=100)
    metadata, raw = segment = segment_object(0)
    while not begun.is_set():  # what a busy machine does not begin before the deadline, it does not do at all
        await local.put(metadata, raw)
    assert await local.get(metadata) is None
    go_on.set()
    while (found := await local.get(metadata)) is None:
        pass
    assert contents(found[0], metadata) == expected(segment)
    local.close()
