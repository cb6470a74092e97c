"""Shared memory: who may use it, when it is used again, and that nothing of it is left."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from tiers.reader.chunk_cache import Extent
from tiers.reader.shared import channel
from tiers.reader.shared.channel import MIN_BYTES, BorrowedBuffers, Place, SharedBuffers

MIB = 1 << 20


@pytest.fixture
def buffers() -> SharedBuffers:
    return SharedBuffers()


def place(buffers: SharedBuffers, view: memoryview) -> Place:
    found = buffers.place_of(view)
    assert found is not None
    return found


def extent(*chunks: bytes) -> Extent:
    return Extent(uuid.UUID(int=1), 3, tuple(memoryview(chunk) for chunk in chunks), sum(map(len, chunks)))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_lent_bytes_are_the_same_memory_and_cannot_be_changed(buffers: SharedBuffers) -> None:
    gone: list[int] = []
    borrowed = BorrowedBuffers(gone.append)
    view = buffers.allocate(MIB)
    view[1000:1004] = b"abcd"
    found = place(buffers, view[900:].toreadonly()[100:104])
    assert found.start == 1000
    lent = borrowed.view(5, found.buffer.fd, found.start, 4)
    assert bytes(lent) == b"abcd"
    view[1000:1004] = b"efgh"
    with pytest.raises(TypeError):
        lent[0] = 1
    part = lent[2:3]
    del lent
    assert (gone, bytes(part)) == ([], b"g")
    del part
    assert gone == [5]


def test_unused_memory_is_bounded_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel, "_MAX_FREE_BYTES", 2 * MIB)
    before = open_files()
    buffers = SharedBuffers()
    views = [buffers.allocate(MIB) for _ in range(5)]
    assert buffers.size_bytes == 5 * MIB
    del views
    small = buffers.allocate(MIN_BYTES)  # it finds no free buffer of its size
    assert (buffers.size_bytes, open_files()) == (2 * MIB + MIN_BYTES, before + 2 * 3)
    borrowed = BorrowedBuffers(lambda number: None)
    lent = [borrowed.view(1, place(buffers, small).buffer.fd, start, 1) for start in (0, 1)]
    assert open_files() == before + 2 * 3 + 1
    del small, buffers, lent, borrowed
    assert open_files() == before


def test_data_from_elsewhere_is_moved_unless_it_is_small(buffers: SharedBuffers) -> None:
    small = extent(b"a" * 100)
    assert buffers.share(small) is small
    chunks = (b"a" * MIN_BYTES, b"b" * 10)
    shared = buffers.share(extent(*chunks))
    assert shared == extent(*chunks)
    assert [place(buffers, chunk).start for chunk in shared.chunks] == [0, MIN_BYTES]
    assert all(chunk.readonly for chunk in shared.chunks)
    assert buffers.share(shared) is shared
    assert buffers.place_of(memoryview(b"elsewhere")) is None


@pytest.mark.parametrize(("size_bytes", "is_shared"), [(MIN_BYTES, True), (MIN_BYTES - 1, False), (MIN_BYTES, False)])
def test_a_store_receives_into_shared_memory_if_there_is_some(
    buffers: SharedBuffers, monkeypatch: pytest.MonkeyPatch, size_bytes: int, is_shared: bool
) -> None:
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    if size_bytes == MIN_BYTES and not is_shared:
        monkeypatch.setattr(os, "memfd_create", refuse)
        plain = extent(b"a" * MIN_BYTES)
        assert buffers.share(plain) is plain
    memory = buffers.memory_for(size_bytes)
    memory[-1:] = b"x"
    assert (len(memory), buffers.place_of(memory) is not None) == (size_bytes, is_shared)
