from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import UUID

import pytest

from tests.support.fakes.local_indexes import contents, decoded, encrypted, expected, segment_object
from tiers.errors import CorruptSegmentError, EncryptionKeyError
from tiers.segment.indexes.local_index_files import (
    LOG_INDEX,
    OFFSET_INDEX,
    SEGMENTS,
    SUFFIXES,
    TIME_INDEX,
    LocalIndexFiles,
    append_to,
)
from tiers.segment.segment_encryption import KeyRing

FIRST, SECOND, FAR = segment_object(100), segment_object(130, chunks=1), segment_object(1000, chunks=2)
STORED = (FIRST, SECOND, FAR)


def filled(folder: Path) -> LocalIndexFiles:
    files = LocalIndexFiles(folder, 100)
    for segment in STORED:
        files.append(decoded(segment))
    return files


@contextmanager
def a_folder() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder)


def found_in(folder: Path) -> int:
    """Returns the number of segments that a new process finds. Fails if one differs from the stored one."""
    found = 0
    for segment in STORED:
        with contextlib.suppress(CorruptSegmentError, FileNotFoundError):
            index = LocalIndexFiles.existing(folder, 100).find(segment[0])
            if index is not None:
                assert contents(index[0], segment[0]) == expected(segment)
                found += 1
    return found


def test_appended_entries_are_found_at_once_and_by_a_later_process(tmp_path: Path) -> None:
    files = filled(tmp_path)
    for reader in (files, LocalIndexFiles.existing(tmp_path, 100)):
        assert (reader.base_offset, reader.last_offset) == (100, 1019)
        for segment in STORED:
            found = reader.find(segment[0])
            assert found is not None
            assert contents(found[0], segment[0]) == expected(segment)
        for start_offset, chunks in ((100, 3), (100, 1), (110, 2), (500, 3)):
            assert reader.find(segment_object(start_offset, chunks, uuid=9)[0]) is None
    with pytest.raises(CorruptSegmentError, match="3 chunks of 3000 bytes for a segment of 4000"):
        files.find(replace(FIRST[0], segment_size_bytes=4000))


def test_the_founding_formats_to_the_byte(tmp_path: Path) -> None:
    """The entry of docs/semantics.md 10.1, and Kafka's two index entries, which point at it."""
    files = LocalIndexFiles(tmp_path, 100)
    files.append(decoded(FIRST))
    files.append(decoded(SECOND))
    entry_bytes = 46 + 37
    log_index = files.path(LOG_INDEX).read_bytes()
    assert files.path(LOG_INDEX).name == "00000000000000000100.remoteLogIndex"
    assert log_index[:8] == bytes.fromhex("0000 004f f01db05f")
    assert log_index[8:entry_bytes] == bytes.fromhex(
        "0000000000000064 000000000000006d 00000174876e8064 00000174876e806d 000003e8 0025"
        "01 0000000000000000 000003e8 00000065 00000000000000000000000000000065 00000000"
    )
    assert len(log_index) == 4 * entry_bytes
    assert files.path(OFFSET_INDEX).read_bytes() == b"".join(
        (10 * n + 9).to_bytes(4, "big") + (entry_bytes * n).to_bytes(4, "big") for n in range(4)
    )
    assert files.path(TIME_INDEX).read_bytes() == b"".join(
        (1_600_000_000_109 + 10 * n).to_bytes(8, "big") + (10 * n + 9).to_bytes(4, "big") for n in range(4)
    )


def test_a_set_takes_ascending_segments_up_to_its_size_and_to_int32(tmp_path: Path) -> None:
    files = filled(tmp_path)
    assert files.takes(segment_object(1020)[0], 1000)
    for start, most_bytes in ((1019, 1000), (1020, 6 * 83), (100 + 2**31, 1000)):
        assert not files.takes(segment_object(start)[0], most_bytes)
    assert files.size_bytes == 4 * 4096


def test_a_segments_key_is_kept_and_needed(tmp_path: Path) -> None:
    ring, other = KeyRing({"k": b"a" * 32}, "k"), KeyRing({"k": b"b" * 32}, "k")
    cipher, section = ring.new_cipher(UUID(int=101))
    files = LocalIndexFiles(tmp_path, 100)
    files.append(decoded(encrypted(FIRST, section)))
    found = files.find(FIRST[0], ring)
    assert found is not None
    assert found[0]._open_chunk is not None
    assert found[0]._open_chunk(0, cipher.seal(0, b"chunk")) == b"chunk"
    for ciphers in (None, other):
        with pytest.raises(EncryptionKeyError):
            files.find(FIRST[0], ciphers)


class Killed(BaseException):
    pass


def killed_after(written_bytes: int) -> Callable[[Path, bytes], None]:
    """The process ends after it has written that many bytes, which stay."""
    left = written_bytes

    def append(path: Path, content: bytes) -> None:
        nonlocal left
        append_to(path, content[:left])
        if left <= len(content):
            raise Killed
        left -= len(content)

    return append


def test_a_process_killed_at_any_byte_leaves_whole_segments_or_none() -> None:
    with a_folder() as folder:
        files = filled(folder)
        total_bytes = sum(files.path(suffix).stat().st_size for suffix in SUFFIXES)
    counts = set()
    for written_bytes in range(total_bytes):
        with a_folder() as folder:
            dying = LocalIndexFiles(folder, 100, killed_after(written_bytes))
            with contextlib.suppress(Killed):
                for segment in STORED:
                    dying.append(decoded(segment))
            counts.add(found_in(folder))
    assert counts == {0, 1, 2}


def test_files_of_another_copy_attempt_at_the_same_offsets_are_no_answer(tmp_path: Path) -> None:
    files = LocalIndexFiles(tmp_path, 100)
    files.append(decoded(segment_object(100, uuid=77)))
    assert files.find(FIRST[0]) is None
    # Even if a set was begun anew while its old offset index survived.
    old = files.path(SEGMENTS).read_bytes()
    files.remove()
    assert not list(tmp_path.iterdir())
    LocalIndexFiles(tmp_path, 100).append(decoded(FIRST))
    files.path(SEGMENTS).write_bytes(old)
    with pytest.raises(CorruptSegmentError, match="another segment"):
        LocalIndexFiles.existing(tmp_path, 100).find(FIRST[0])
