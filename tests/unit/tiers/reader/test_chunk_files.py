"""A chunk is read from its file as it was written, or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.reader.chunk_cache import ChunkKey
from tiers.reader.chunk_files import ChunkFiles, file_bytes

SEGMENT = UUID(int=7)
KEY = ChunkKey(SEGMENT, 3)


def write(folder: Path, key: ChunkKey, data: bytes) -> Path:
    ChunkFiles(folder).write(key, memoryview(data), lambda: None)
    return folder / f"{key.segment.hex}-{key.number}"


def read(folder: Path, *keys: ChunkKey) -> list[bytes]:
    return [bytes(view) for view in ChunkFiles(folder).read(keys)]


def test_a_run_comes_back_up_to_what_is_missing(tmp_path: Path) -> None:
    keys = [ChunkKey(SEGMENT, number) for number in range(4)]
    for key in keys:
        write(tmp_path, key, bytes([key.number]) * 1000)
    ChunkFiles(tmp_path).remove([ChunkKey(SEGMENT, 9), keys[2]])
    assert read(tmp_path, *keys) == [b"\0" * 1000, b"\1" * 1000]
    assert read(tmp_path, keys[2]) == []


def test_others_of_the_machine_cannot_read_them(tmp_path: Path) -> None:
    ChunkFiles(tmp_path / "chunks").load()
    path = write(tmp_path / "chunks", KEY, b"records")
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)


def test_a_next_process_finds_them_the_longest_unused_first(tmp_path: Path) -> None:
    keys = [ChunkKey(UUID(int=n), n) for n in range(3)]
    for age, key in enumerate(keys):
        os.utime(write(tmp_path, key, bytes(5000 * key.number)), (age, age))
    read(tmp_path, keys[0])
    torn, foreign = tmp_path / f"{SEGMENT.hex}-4.part", tmp_path / "lost+found"
    torn.write_bytes(b"left by a crash")
    foreign.mkdir()
    assert ChunkFiles(tmp_path).load() == [(keys[1], 8192), (keys[2], 12288), (keys[0], file_bytes(0))]
    assert (torn.exists(), foreign.exists()) == (False, True)


def test_a_write_that_is_given_up_leaves_nothing(tmp_path: Path) -> None:
    def give_up() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        ChunkFiles(tmp_path).write(KEY, memoryview(b"records"), give_up)
    assert list(tmp_path.iterdir()) == []


@given(data=st.binary(max_size=200), cut=st.integers(0, 227), flipped=st.integers(0, 8 * 228 - 1))
def test_a_file_that_is_torn_damaged_or_renamed_is_not_there(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, flipped: int
) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    path = write(folder, KEY, data)
    whole = path.read_bytes()
    assert read(folder, KEY) == [data]
    if cut < len(whole):
        path.write_bytes(whole[:cut])
        assert read(folder, KEY) == []
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        assert read(folder, KEY) == ([data] if not any(whole[cut:]) else [])
    damaged = bytearray(whole)
    damaged[flipped // 8 % len(whole)] ^= 1 << flipped % 8
    path.write_bytes(damaged)
    assert read(folder, KEY) == []
    path.with_name(f"{SEGMENT.hex}-4").write_bytes(whole)
    assert read(folder, ChunkKey(SEGMENT, 4)) == []
