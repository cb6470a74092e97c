"""The owner appends the index of each segment that it copied to local files, and readers need no GET for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.local_index_cache import LocalIndexCache, LocalIndexes, SharedIndexFiles
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteReadRequest, decode_index, monotonic_ms
from tiers.segment.indexes.local_index_files import LOG_INDEX, append_to
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.deletion.segment_deletion import delete_all
from tiers.tasks.deletion.topic_deletion import begin_partition_deletion, end_partition_deletion

RING = KeyRing({"k": b"1" * 32}, current="k")
NO_KEY = KeyRing()


@dataclass
class Owner:
    bench: Workbench
    folder: Path
    is_full: bool = False
    index_gets: list[int] = field(default_factory=list)
    """The start offsets of the segments whose `.indexes` objects were read."""

    def start(self, ring: KeyRing = NO_KEY) -> None:
        cache = LocalIndexCache(self.folder, RemoteLogConfig(), monotonic_ms, ring, self._append)
        indexes = LocalIndexes(cache, deadline_ms=60_000)
        self.bench.services = replace(self.bench.services, key_ring=ring, local_indexes=indexes)
        self.bench.restart()

    def _append(self, path: Path, content: bytes) -> None:
        if self.is_full:
            append_to(path, content[:5])
            raise OSError(28, "No space left on device")
        append_to(path, content)

    async def copy(self, batches: int = 10) -> None:
        first = self.bench.log.end_offset
        self.bench.log.append(*[batch_of(first + 10 * n, 10, value_bytes=15) for n in range(batches)])
        await self.bench.copy_all()
        self.index_gets.clear()

    async def read_as_a_worker(self, ring: KeyRing = NO_KEY) -> list[bytes]:
        """Reads the first chunk of each segment as another process does."""
        own = LocalIndexCache(self.folder.parent / "index-worker-1", RemoteLogConfig(), monotonic_ms, ring)
        local = LocalIndexes(own, 60_000, SharedIndexFiles(self.folder, ring))
        decode = partial(decode_index, ciphers=ring)
        async with RemoteLogReader(
            self.bench.metadata.log, self.bench.store, decode_indexes=decode, local_indexes=local
        ) as reader:
            read = []
            for first, _ in self.bench.finished:
                request = RemoteReadRequest(
                    PARTITION,
                    first,
                    100,
                    min_one_message=True,
                    isolation_level=0,
                    deadline_ms=monotonic_ms() + 20_000,
                    connection_id=1,
                )
                read.append(b"".join((await reader.read(request)).records))
        return read

    def files(self) -> list[str]:
        return sorted(str(path.relative_to(self.folder)) for path in self.folder.glob(f"*/*{LOG_INDEX}"))


@pytest.fixture
def owner(bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Owner:
    made = Owner(bench, tmp_path / "index")
    fetch = bench.store.fetch_indexes

    async def counted(metadata: RemoteLogSegmentMetadata) -> bytes:
        made.index_gets.append(metadata.start_offset)
        return await fetch(metadata)

    monkeypatch.setattr(bench.store, "fetch_indexes", counted)
    made.start()
    return made


@pytest.mark.parametrize("ring", [NO_KEY, RING], ids=["plain", "encrypted"])
async def test_the_first_read_of_a_copied_segment_gets_no_index(owner: Owner, ring: KeyRing) -> None:
    owner.start(ring)
    await owner.copy()
    assert owner.bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert owner.files() == ["orders-0/00000000000000000000.remoteLogIndex"]
    read = await owner.read_as_a_worker(ring)
    assert [owner.bench.log.bytes_of(first, first + 9) for first, _ in owner.bench.finished] == [
        one[: len(owner.bench.log.bytes_of(0, 9))] for one in read
    ]
    assert owner.index_gets == []


async def test_a_restarted_owner_begins_new_files(owner: Owner) -> None:
    await owner.copy(4)
    owner.start()
    await owner.copy(4)
    assert [path.partition("/")[2][:20] for path in owner.files()] == ["0" * 20, f"{30:020}"]
    await owner.read_as_a_worker()
    assert owner.index_gets == []


async def test_a_full_disk_fails_no_copy(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    owner.is_full = True
    await owner.copy()
    assert owner.bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert caplog.text.count("local index files cannot be read or written") == 1
    assert owner.files() == []
    await owner.read_as_a_worker()
    assert owner.index_gets == [0, 30, 60]
    owner.is_full = False
    await owner.copy(4)
    await owner.read_as_a_worker()
    assert 90 not in owner.index_gets


async def test_no_error_of_the_local_files_fails_a_copy(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        async def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
            raise ZeroDivisionError

        async def remove_below(self, partition: TopicIdPartition, offset: int) -> None:
            raise NotImplementedError

    owner.bench.services = replace(owner.bench.services, local_indexes=Broken())
    owner.bench.restart()
    await owner.copy()
    assert owner.bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert "is not in the local index files" in caplog.text


async def test_a_crash_before_the_append_costs_a_get(owner: Owner) -> None:
    owner.bench.end_after = "copy-finished-written"
    with pytest.raises(ProcessEnded):
        await owner.copy()
    owner.bench.end_after = ""
    owner.start()
    await owner.bench.copy_all()
    owner.index_gets.clear()
    await owner.read_as_a_worker()
    assert owner.index_gets == [0]


async def test_entries_of_an_attempt_that_another_owner_replaced_are_not_used(owner: Owner) -> None:
    """The other owner's segments have other uuids. Here its copy is this one's, whose metadata is lost."""
    await owner.copy()
    stale = set(owner.files())
    lost = type(owner.bench)(owner.bench.folder, owner.bench.store, owner.bench.log)
    other = replace(owner, bench=lost)
    await lost.copy_all()
    owner.index_gets.clear()
    await other.read_as_a_worker()
    assert owner.index_gets == [0, 30, 60]
    assert set(owner.files()) == stale


async def test_the_owner_removes_the_files_below_the_log_start(owner: Owner) -> None:
    await owner.copy()
    owner.start()
    await owner.copy(4)
    before = owner.files()
    size_bytes = owner.bench.segments[0].segment_size_bytes
    assert await owner.bench.expire(replace(POLICY, retention_bytes=size_bytes)) == 3
    assert owner.files() == before[1:]
    await owner.read_as_a_worker()
    assert owner.index_gets == []


async def test_the_owner_removes_the_files_of_a_deleted_topic(owner: Owner) -> None:
    await owner.copy()
    assert owner.files()
    services = owner.bench.services
    await delete_all(services, await begin_partition_deletion(services, PARTITION), lambda: None)
    await end_partition_deletion(services, PARTITION)
    assert owner.files() == []
