"""The verification names every fault of a stored segment, and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import (
    Section,
    decode_sections,
    encode_leader_epoch_checkpoint,
    encode_sections,
)
from tiers.segment.indexes.segment_index import (
    AbortedTransactionRange,
    Chunk,
    decode_remote_log_index,
    encode_aborted_ranges,
    encode_remote_log_index,
)
from tiers.segment.segment_encryption import KeyRing, seal_segment
from tiers.storage.local import LocalRemoteStorageManager
from tiers.verify.segment_verification import Damage, DamageKind, verify_segment

RING = KeyRing({"k": b"k" * 32}, "k")


@dataclass
class Stored:
    """A segment of four chunks of two batches."""

    store: LocalRemoteStorageManager
    root: Path
    segment: RemoteLogSegmentMetadata
    chunks: tuple[Chunk, ...]
    ring: KeyRing | None

    def file(self, suffix: str) -> Path:
        [found] = self.root.rglob(f"*{suffix}")
        return found

    def change(self, suffix: str, change: Callable[[bytes], bytes]) -> None:
        self.file(suffix).write_bytes(change(self.file(suffix).read_bytes()))

    async def verify(self, **changes: object) -> list[Damage]:
        segment = replace(self.segment, **changes)  # type: ignore[arg-type]  # the fields are named by the tests
        return [*(await verify_segment(self.store, segment, self.ring, run_bytes=1500, pause_ms=0)).damages]


@pytest.fixture(params=["plain", "sealed"])
async def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Stored:
    batches = [batch_of(10 * number, 10, value_bytes=30) for number in range(8)]
    built = build_segment(tmp_path / "log", batches, chunk_bytes=2 * max(map(len, batches)))
    metadata = metadata_of(built)
    is_sealed = request.param == "sealed"
    copied = seal_segment(built, metadata.segment_id.id, RING, tmp_path / "sealed") if is_sealed else built
    root = tmp_path / "remote"
    root.mkdir()
    store = LocalRemoteStorageManager({"path": str(root), "cluster.id": "cluster"})
    await store.open()
    await store.copy_log_segment_data(metadata, copied.log_segment_data(metadata))
    assert len(copied.chunks) == 4
    return Stored(store, root, metadata, copied.chunks, RING if is_sealed else None)


def flipped(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes((data[at] ^ 1,)) + data[at + 1 :]


async def test_a_whole_segment_has_no_findings(stored: Stored) -> None:
    counted: list[int] = []
    assert await stored.verify() == []
    verdict = await verify_segment(stored.store, stored.segment, stored.ring, on_read=counted.append)
    assert (verdict.damages, verdict.batches) == ((), 8)
    assert sum(counted) == verdict.log_bytes == stored.segment.segment_size_bytes


async def test_each_damaged_chunk_is_named_and_no_other(stored: Stored) -> None:
    for number in (1, 3):
        stored.change(".log", flipped(stored.chunks[number].stored_position + 70))
    found = await stored.verify()
    assert [(each.first_offset, each.last_offset, each.position) for each in found] == [
        (chunk.first_offset, chunk.last_offset, chunk.stored_position) for chunk in (stored.chunks[1], stored.chunks[3])
    ]


async def test_a_log_that_is_cut_short(stored: Stored) -> None:
    stored.change(".log", lambda data: data[: stored.chunks[2].stored_position + 5])
    found = await stored.verify()
    assert [each.position for each in found] == [chunk.stored_position for chunk in stored.chunks[2:]]


@pytest.mark.parametrize(("suffix", "position"), [(".log", 0), (".indexes", None)])
async def test_a_missing_object(stored: Stored, suffix: str, position: int | None) -> None:
    stored.file(suffix).unlink()
    whole = stored.segment.start_offset, stored.segment.end_offset
    [found] = await stored.verify()
    assert found == Damage(*whole, position, f"the {suffix} object is missing", DamageKind.MISSING)


async def test_indexes_that_are_torn_or_of_something_else(stored: Stored) -> None:
    [found] = await stored.verify(segment_leader_epochs=(LeaderEpochEntry(9, 0),))
    assert "differ in size, leader epochs or timestamp" in found.what
    stored.change(".indexes", flipped(200))
    [found] = await stored.verify()
    assert "CRC mismatch" in found.what


async def test_a_missing_key_is_named_for_the_segment(stored: Stored) -> None:
    is_sealed, stored.ring = stored.ring is not None, KeyRing()
    found = await stored.verify()
    assert ["add it to [encryption.keys]" in each.what for each in found] == [True] * is_sealed


def later(remote_log_index: bytes) -> bytes:
    first, second, *others = decode_remote_log_index(remote_log_index)
    return encode_remote_log_index([first, replace(second, max_timestamp_ms=second.max_timestamp_ms + 1), *others])


@pytest.mark.parametrize(
    ("section", "make_stale", "what"),
    [
        (Section.OFFSET_INDEX, lambda index: index + struct.pack(">ii", 70, 1000), "offset index does"),
        (Section.TIME_INDEX, flipped(7), "time index does"),
        (Section.REMOTE_LOG_INDEX, later, "remote log index does"),
        (
            Section.LEADER_EPOCH_CHECKPOINT,
            lambda _: encode_leader_epoch_checkpoint((LeaderEpochEntry(3, 0),)),
            "leader epochs do",
        ),
        (
            Section.ABORTED_TRANSACTIONS,
            lambda _: encode_aborted_ranges((AbortedTransactionRange(7, 0, 19),)),
            "aborted transactions do",
        ),
    ],
)
async def test_an_index_that_is_whole_and_not_the_logs_is_stale(
    stored: Stored, section: Section, make_stale: Callable[[bytes], bytes], what: str
) -> None:
    def change(data: bytes) -> bytes:
        sections = {number: bytes(content) for number, content in decode_sections(data).items()}
        return encode_sections(sections | {section: make_stale(sections[section])})

    stored.change(".indexes", change)
    said = f"the {what} not match the log"
    assert await stored.verify() == [Damage(0, 79, None, said, DamageKind.STALE_INDEX)]
