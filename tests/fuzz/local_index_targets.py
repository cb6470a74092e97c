"""What must hold for any bytes in the local index files of a partition."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory

from tests.support.fakes.local_indexes import contents, decoded, expected, segment_object
from tiers.errors import CorruptSegmentError
from tiers.segment.indexes.local_index_files import SUFFIXES, LocalIndexFiles

BASE_OFFSET = 100
STORED = (segment_object(100), segment_object(130, 1), segment_object(1000, 2))
_EXPECTED = [(metadata, expected((metadata, raw))) for metadata, raw in STORED]

_LENGTHS = Struct(">4H")


_written: dict[str, bytes] = {}
"""What lies in the folder: writing takes longer than all the rest."""


@cache
def _folder() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


def stored_files() -> bytes:
    """The four files of `STORED`, as an input."""
    with TemporaryDirectory() as folder:
        files = LocalIndexFiles(Path(folder), BASE_OFFSET)
        for segment in STORED:
            files.append(decoded(segment))
        return joined([files.path(suffix).read_bytes() for suffix in SUFFIXES])


def joined(contents_of_files: list[bytes]) -> bytes:
    return b"".join((_LENGTHS.pack(*map(len, contents_of_files)), *contents_of_files))


def local_index_files(data: bytes) -> bool:
    """A segment is found as it was stored, or not at all: checksums tell what is damaged from what is whole."""
    if len(data) < _LENGTHS.size:
        return False
    folder = Path(_folder().name)
    files = LocalIndexFiles(folder, BASE_OFFSET)
    start = _LENGTHS.size
    for suffix, length in zip(SUFFIXES, _LENGTHS.unpack_from(data), strict=True):
        content = data[start : start + length]
        if _written.get(suffix) != content:
            files.path(suffix).write_bytes(content)
            _written[suffix] = content
        start += length
    found = 0
    try:
        files = LocalIndexFiles.existing(folder, BASE_OFFSET)
    except CorruptSegmentError:
        return False
    for metadata, stored in _EXPECTED:
        try:
            index = files.find(metadata)
        except CorruptSegmentError:
            continue
        if index is not None:
            assert contents(index[0], metadata) == stored
            found += 1
    return found > 0
