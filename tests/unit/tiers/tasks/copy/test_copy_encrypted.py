"""A key ring in the copier and in the reader: the store has no plaintext, and clients get the same bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import ProcessEnded, Workbench
from tiers.config.settings import RemoteLogConfig
from tiers.reader.remote_log_reader import (
    RemoteLogReaderSettings,
)
from tiers.segment.segment_encryption import KeyRing

RING = KeyRing({"k1": b"1" * 32, "k2": b"2" * 32}, current="k1")
SETTINGS = RemoteLogReaderSettings(
    min_get_bytes=300, max_get_bytes=600, remote_log=RemoteLogConfig(chunk_cache_bytes=1 << 20)
)


def encrypt_with(bench: Workbench, ring: KeyRing) -> None:
    bench.services = replace(bench.services, key_ring=ring)
    bench.restart()


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
    assert (bench.finished, bench.services.spool.used_bytes) == ([(0, 29)], 0)
    assert bench.log.bytes_of(0, 9)[61:] not in await bench.remote_bytes()
