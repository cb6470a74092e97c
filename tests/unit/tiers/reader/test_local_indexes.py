"""The local index files on the way of a read."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.fakes.local_indexes import contents, expected, segment_object
from tests.support.fakes.remote_requests import P0, read_all
from tests.support.fakes.remote_tier import RemoteTier
from tiers.config.settings import RemoteLogConfig
from tiers.reader.local_index_cache import LocalIndexCache, LocalIndexes
from tiers.reader.remote_log_reader import RemoteLogReader, monotonic_ms
from tiers.segment.indexes.local_index_files import append_to


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


async def test_after_a_restart_nothing_is_fetched_but_records(
    tier: RemoteTier, fetched: list[int], tmp_path: Path
) -> None:
    made = b"".join(await tier.fill(P0, segments=3, batches=4))
    for starts, counts in (([0, 40, 80], (0, 3)), ([], (3, 0))):
        local = local_indexes(tmp_path)
        async with RemoteLogReader(tier.rlmm.log, tier.storage, local_indexes=local) as reader:
            assert await read_all(reader, 120) == made
        assert (sorted(fetched), (local.hits, local.misses)) == (starts, counts)
        fetched.clear()


async def test_a_stuck_disk_holds_nothing_up(tmp_path: Path) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def append(path: Path, content: bytes) -> None:
        begun.set()
        assert go_on.wait(60)
        append_to(path, content)

    cache = LocalIndexCache(tmp_path / "index", RemoteLogConfig(), monotonic_ms, append=append)
    local = LocalIndexes(cache, deadline_ms=100)
    metadata, raw = segment = segment_object(0)
    while not begun.is_set():  # a busy machine does not begin a write after the deadline
        await local.put(metadata, raw)
    assert await local.get(metadata) is None
    go_on.set()
    while (found := await local.get(metadata)) is None:
        pass
    assert contents(found[0], metadata) == expected(segment)
    local.close()
