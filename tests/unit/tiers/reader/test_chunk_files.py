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

KEY = ChunkKey(UUID(int=7), 3)


@pytest.fixture
def files(tmp_path: Path) -> ChunkFiles:
    made = ChunkFiles(tmp_path / "chunks")
    made.load()
    return made


def write(files: ChunkFiles, key: ChunkKey, data: bytes) -> None:
    files.write(key, memoryview(data), lambda: None)


def read(files: ChunkFiles, *keys: ChunkKey) -> list[bytes]:
    return [bytes(view) for view in files.read(keys)]


def test_a_run_comes_back_up_to_what_is_missing(files: ChunkFiles) -> None:
    keys = [ChunkKey(KEY.segment, number) for number in range(4)]
    for key in keys:
        if key.number != 2:
            write(files, key, bytes([key.number]) * 1000)
    assert read(files, *keys) == [b"\0" * 1000, b"\1" * 1000]
    assert read(files, keys[2]) == []


def test_others_of_the_machine_cannot_read_them(files: ChunkFiles, tmp_path: Path) -> None:
    write(files, KEY, b"records")
    (path,) = (tmp_path / "chunks").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_next_process_finds_them_the_longest_unused_first(files: ChunkFiles, tmp_path: Path) -> None:
    keys = [ChunkKey(UUID(int=n), n) for n in range(3)]
    for age, key in enumerate(keys):
        write(files, key, bytes(5000 * key.number))
        os.utime(tmp_path / "chunks" / f"{key.segment.hex}-{key.number}", (age, age))
    read(files, keys[0])
    assert ChunkFiles(tmp_path / "chunks").load() == [(keys[1], 8192), (keys[2], 12288), (keys[0], 4096)]


def test_leftovers_of_a_crash_are_removed_and_foreign_files_stay(files: ChunkFiles, tmp_path: Path) -> None:
    write(files, KEY, b"records")
    torn = tmp_path / "chunks" / f"{KEY.segment.hex}-4.part"
    torn.write_bytes(b"rec")
    other = tmp_path / "chunks" / "lost+found"
    other.mkdir()
    assert files.load() == [(KEY, file_bytes(7))]
    assert not torn.exists()
    assert other.exists()


def test_a_write_that_is_given_up_leaves_nothing(files: ChunkFiles, tmp_path: Path) -> None:
    def give_up() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        files.write(KEY, memoryview(b"records"), give_up)
    assert list((tmp_path / "chunks").iterdir()) == []


def test_a_file_under_another_name_is_not_that_chunk(files: ChunkFiles, tmp_path: Path) -> None:
    write(files, KEY, b"records")
    (path,) = (tmp_path / "chunks").iterdir()
    path.rename(path.with_name(f"{KEY.segment.hex}-4"))
    assert read(files, ChunkKey(KEY.segment, 4)) == []


def test_removing_what_is_not_there_is_no_error(files: ChunkFiles) -> None:
    write(files, KEY, b"records")
    files.remove([ChunkKey(KEY.segment, 9), KEY])
    assert read(files, KEY) == []


@given(data=st.binary(max_size=200), cut=st.integers(0, 227), flipped=st.integers(0, 8 * 228 - 1))
def test_a_file_that_is_torn_or_damaged_is_not_there(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, cut: int, flipped: int
) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    files = ChunkFiles(folder)
    write(files, KEY, data)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    assert read(files, KEY) == [data]
    if cut < len(whole):
        path.write_bytes(whole[:cut])
        assert read(files, KEY) == []
        path.write_bytes(whole[:cut] + bytes(len(whole) - cut))
        assert read(files, KEY) == ([data] if not any(whole[cut:]) else [])
    damaged = bytearray(whole)
    damaged[flipped // 8 % len(whole)] ^= 1 << flipped % 8
    path.write_bytes(damaged)
    assert read(files, KEY) == []
