"""Shared memory: who may use it, when it is used again, and that nothing of it is left."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from tiers.reader.chunk_cache import Extent
from tiers.reader.shared import buffers as buffers_module
from tiers.reader.shared.buffers import MIN_BYTES, AttachedBuffers, Place, SharedBuffers

MIB = 1 << 20
BORROWER, OTHER = 7, 8


def place(buffers: SharedBuffers, view: memoryview) -> Place:
    found = buffers.place_of(view)
    assert found is not None
    return found


def extent(*chunks: bytes) -> Extent:
    return Extent(uuid.UUID(int=1), 3, tuple(memoryview(chunk) for chunk in chunks), sum(map(len, chunks)))


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_lent_bytes_are_the_same_memory_and_cannot_be_changed() -> None:
    gone: list[int] = []
    buffers, attached = SharedBuffers(), AttachedBuffers(gone.append)
    view = buffers.allocate(MIB)
    view[1000:1004] = b"abcd"
    found = place(buffers, view[900:].toreadonly()[100:104])
    assert found.start == 1000
    attached.attach(5, found.buffer.fd)
    lent = attached.view(5, found.start, 4)
    assert bytes(lent) == b"abcd"
    view[1000:1004] = b"efgh"
    assert bytes(lent) == b"efgh"
    with pytest.raises(TypeError):
        lent[0] = 1
    part = lent[2:3]
    attached.forget(5)
    del lent
    assert (gone, bytes(part)) == ([], b"g")
    del part
    assert gone == [5]


def test_lent_memory_is_used_again_when_views_and_borrowers_are_gone() -> None:
    buffers = SharedBuffers()
    view = buffers.allocate(MIB)
    first = place(buffers, view).buffer
    rest: list[memoryview] = [view[10:20]]
    for borrower in (BORROWER, BORROWER, OTHER):
        buffers.lend(first, borrower)
    del view
    steps: list[Callable[[], object]] = [
        rest.clear,
        lambda: buffers.give_back(first.number, BORROWER),
        lambda: buffers.give_back(first.number, BORROWER),
        lambda: buffers.give_back_all(OTHER),
    ]
    for step in steps:
        held = buffers.allocate(MIB)
        assert place(buffers, held).buffer is not first
        del held
        step()
    taken = [buffers.allocate(MIB), buffers.allocate(MIB)]
    assert first in [place(buffers, each).buffer for each in taken]


def test_only_what_was_lent_can_be_given_back() -> None:
    buffers = SharedBuffers()
    view = buffers.allocate(MIB)
    for unknown in (place(buffers, view).buffer.number, 99):
        with pytest.raises(KeyError):
            buffers.give_back(unknown, BORROWER)


def test_unused_memory_is_bounded_and_leaves_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers_module, "_MAX_FREE_BYTES", 2 * MIB)
    dropped: list[int] = []
    before = open_files()
    buffers = SharedBuffers(dropped.append)
    views = [buffers.allocate(MIB) for _ in range(5)]
    assert buffers.size_bytes == 5 * MIB
    del views
    small = buffers.allocate(MIN_BYTES)  # it finds no free buffer of its size
    assert (len(dropped), buffers.size_bytes) == (3, 2 * MIB + MIN_BYTES)
    del small, buffers
    assert open_files() == before


def test_data_from_elsewhere_is_moved_unless_it_is_small() -> None:
    buffers = SharedBuffers()
    small = extent(b"a" * 100)
    assert buffers.share(small) is small
    chunks = (b"a" * MIN_BYTES, b"b" * 10)
    shared = buffers.share(extent(*chunks))
    assert tuple(map(bytes, shared.chunks)) == chunks
    assert (shared.segment, shared.first_number, shared.size_bytes) == (uuid.UUID(int=1), 3, MIN_BYTES + 10)
    assert [place(buffers, chunk).start for chunk in shared.chunks] == [0, MIN_BYTES]
    assert all(chunk.readonly for chunk in shared.chunks)
    assert buffers.share(shared) is shared
    assert buffers.place_of(memoryview(b"elsewhere")) is None


def test_without_a_free_file_data_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    plain, buffers = extent(b"a" * MIN_BYTES), SharedBuffers()
    assert buffers.share(plain) is plain
    memory = buffers.memory_for(MIN_BYTES)
    assert (len(memory), buffers.place_of(memory)) == (MIN_BYTES, None)


@pytest.mark.parametrize(("size_bytes", "is_shared"), [(MIN_BYTES, True), (MIN_BYTES - 1, False)])
def test_a_store_receives_into_shared_memory_unless_the_answer_is_small(size_bytes: int, is_shared: bool) -> None:
    buffers = SharedBuffers()
    memory = buffers.memory_for(size_bytes)
    memory[-1:] = b"x"
    assert len(memory) == size_bytes
    assert (buffers.place_of(memory) is not None) == is_shared
