"""A key ring in the copier and in the reader: the store has no plaintext, and clients get the same bytes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.config.settings import RemoteLogConfig
from tiers.errors import CorruptSegmentError, EncryptionKeyError, RemoteStorageError
from tiers.reader.remote_log_reader import (
    RemoteLogReader,
    RemoteLogReaderSettings,
    RemoteReadRequest,
    decode_index,
    monotonic_ms,
)
from tiers.segment.segment_encryption import KeyRing

RING = KeyRing({"k1": b"1" * 32, "k2": b"2" * 32}, current="k1")
SETTINGS = RemoteLogReaderSettings(
    min_get_bytes=300, max_get_bytes=600, remote_log=RemoteLogConfig(chunk_cache_bytes=1 << 20)
)


def encrypt_with(bench: Workbench, ring: KeyRing) -> None:
    bench.services = replace(bench.services, key_ring=ring)
    bench.restart()


async def read(bench: Workbench, offset: int, ring: KeyRing) -> bytes:
    decode = partial(decode_index, ciphers=ring)
    async with RemoteLogReader(bench.metadata.log, bench.store, SETTINGS, decode_indexes=decode) as reader:
        found = await reader.read(
            RemoteReadRequest(
                PARTITION,
                offset,
                100_000,
                min_one_message=True,
                isolation_level=0,
                deadline_ms=monotonic_ms() + 20_000,
                connection_id=1,
            )
        )
        return b"".join(found.records)


async def test_the_store_has_no_plaintext_and_a_reader_gets_the_brokers_bytes(bench: Workbench) -> None:
    encrypt_with(bench, RING)
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    stored = await bench.remote_bytes()
    assert bench.log.bytes_of(0, 9)[61:] not in stored
    assert bench.spooled() == []
    for first, _ in bench.finished:
        found = await read(bench, first, RING)
        assert found
        assert bench.log.bytes_of(first, 89).startswith(found)


async def test_segments_of_both_kinds_and_both_keys_stand_side_by_side(bench: Workbench) -> None:
    for number, ring in enumerate((KeyRing(), RING, replace(RING, current="k2"))):
        encrypt_with(bench, ring)
        bench.log.append(*[batch_of(30 * number + 10 * n, 10, value_bytes=15) for n in range(4 if number == 2 else 3)])
        await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    for first, _ in bench.finished:
        found = await read(bench, first, RING)
        assert found
        assert bench.log.bytes_of(first, 89).startswith(found)


async def test_a_reader_without_the_key_says_which(bench: Workbench) -> None:
    encrypt_with(bench, RING)
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(4)])
    await bench.copy_all()
    with pytest.raises(EncryptionKeyError, match="'k1'"):
        await read(bench, 0, KeyRing({"k2": b"2" * 32}))


async def test_bytes_that_the_store_changed_are_never_served(bench: Workbench) -> None:
    encrypt_with(bench, RING)
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(4)])
    await bench.copy_all()
    [log] = (bench.folder / "remote").rglob("*.log")
    whole = bytearray(log.read_bytes())
    whole[100] ^= 1
    log.chmod(0o600)
    log.write_bytes(whole)
    with pytest.raises(CorruptSegmentError):
        await read(bench, 0, RING)


@pytest.mark.parametrize("step", ["segment-kept", "copy-started-written", "objects-written", "copy-verified"])
async def test_a_copy_that_ends_anywhere_leaves_no_plaintext_behind(bench: Workbench, step: str) -> None:
    encrypt_with(bench, RING)
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(4)])
    bench.end_after = step
    with pytest.raises(ProcessEnded):
        await bench.copy_all()
    bench.end_after = ""
    bench.restart()
    assert sorted(path.suffix for path in bench.spooled()) == [".indexes", ".log"]
    assert all(bench.log.bytes_of(0, 9)[61:] not in path.read_bytes() for path in bench.spooled())
    await bench.copy_all()
    assert bench.finished == [(0, 29)]
    assert bench.services.spool.used_bytes == 0


async def test_an_owner_that_lost_the_key_of_a_segment_does_not_trim_it(bench: Workbench) -> None:
    encrypt_with(bench, RING)
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])
    await bench.copy_all()
    await bench.check_facts()
    bench.now_ms += bench.services.settings.remote_log.visible_after_ms
    keep_nothing = replace(POLICY, local_retention_bytes=0)
    encrypt_with(bench, KeyRing({"k2": b"2" * 32}, current="k2"))
    with pytest.raises(RemoteStorageError, match="add it to"):
        await bench.trim(keep_nothing)
    assert bench.log.trims == []
    encrypt_with(bench, RING)
    assert await bench.trim(keep_nothing) == 60
