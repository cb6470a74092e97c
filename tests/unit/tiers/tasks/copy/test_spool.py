"""The spool: what a restart finds again, and work in its threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.copy.spool import KeptSegment, Spool, SpoolError

RECORDS = batch_of(0, 10, value_bytes=50) + batch_of(10, 10, value_bytes=50)
RING = KeyRing({"k1": b"1" * 32}, current="k1")
rings = pytest.mark.parametrize("key_ring", [KeyRing(), RING], ids=["plain", "encrypted"])


@asynccontextmanager
async def spool_in(folder: Path) -> AsyncIterator[Spool]:
    spool = Spool(folder / "spool", 1 << 20, 1)
    try:
        await spool.open()
        yield spool
    finally:
        spool.close()


async def keep(folder: Path, key_ring: KeyRing) -> KeptSegment:
    """Keeps a segment in a process that ends after that."""
    async with spool_in(folder) as spool:
        built = build_segment(folder / "spool" / "built.spool", [RECORDS])
        kept = await spool.keep(metadata_of(built), built, key_ring)
        built.log_segment.unlink(missing_ok=True)
        return kept


async def found(folder: Path) -> list[KeptSegment]:
    async with spool_in(folder) as spool:
        return spool.kept()


def files(folder: Path) -> list[str]:
    return sorted(path.suffix for path in (folder / "spool").iterdir())


@rings
async def test_a_kept_segment_survives_a_restart(tmp_path: Path, key_ring: KeyRing) -> None:
    kept = await keep(tmp_path, key_ring)
    assert files(tmp_path) == [".indexes", ".log"]
    assert await found(tmp_path) == [kept]
    assert (kept.log.read_bytes() == RECORDS) is (key_ring.current is None)
    assert kept.is_intact(key_ring)
    assert decode_indexes_object(kept.data().indexes, kept.metadata).metadata == kept.metadata
    async with spool_in(tmp_path) as spool:
        assert spool.used_bytes == kept.log.stat().st_size
        await spool.remove(kept)
        await spool.remove(kept)
        assert spool.used_bytes == 0
    assert files(tmp_path) == []


@pytest.mark.parametrize("suffix", [".log", ".indexes"])
@pytest.mark.parametrize(
    "damage",
    [lambda raw: raw[:-1], lambda raw: raw[:-5] + b"?" + raw[-4:], lambda raw: b""],
    ids=["short", "changed", "empty"],
)
async def test_damage_to_a_file_is_found(tmp_path: Path, suffix: str, damage: Callable[[bytes], bytes]) -> None:
    kept = await keep(tmp_path, KeyRing())
    path = kept.log.with_suffix(suffix)
    path.write_bytes(damage(path.read_bytes()))
    assert not kept.is_intact(KeyRing())


async def test_files_that_are_not_complete_are_removed_at_the_start(tmp_path: Path) -> None:
    kept = await keep(tmp_path, RING)
    kept.log.rename(kept.log.with_suffix(".part"))
    kept.log.with_suffix(".spool").touch()
    assert await found(tmp_path) == []
    assert files(tmp_path) == []


async def test_files_of_a_later_format_stay(tmp_path: Path) -> None:
    kept = await keep(tmp_path, KeyRing())
    raw = kept.indexes.read_bytes()
    kept.indexes.write_bytes(raw[:5] + bytes([raw[5] + 1]) + raw[6:])
    assert await found(tmp_path) == []
    assert files(tmp_path) == [".indexes", ".log"]
    kept.indexes.write_bytes(raw)
    assert await found(tmp_path) == [kept]


@rings
async def test_a_full_disk_leaves_the_built_segment_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key_ring: KeyRing
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    async with spool_in(tmp_path) as spool:
        built = build_segment(tmp_path / "spool" / "built.spool", [RECORDS])
        with monkeypatch.context() as patched:
            patched.setattr("os.fsync", full)
            with pytest.raises(SpoolError, match=r"spool.*no space left"):
                await spool.keep(metadata_of(built), built, key_ring)
        assert files(tmp_path) == [".spool"]
        assert built.log_segment.read_bytes() == RECORDS
        kept = await spool.keep(metadata_of(built), built, key_ring)
        assert kept.is_intact(key_ring)


@pytest.mark.parametrize("cancellations", [1, 3])
async def test_a_cancelled_caller_waits_for_the_end_of_the_work(tmp_path: Path, cancellations: int) -> None:
    """A copy is ended, and cancelled once more when its process stops."""
    begun, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        go_on.wait(120)
        done.set()

    async with spool_in(tmp_path) as spool:
        caller = asyncio.create_task(spool.run(work))
        await asyncio.to_thread(begun.wait, 120)
        for _ in range(cancellations):
            caller.cancel()
            await asyncio.wait({caller}, timeout=0.01)
        waits = not caller.done()
        go_on.set()
        assert waits
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert done.is_set()
