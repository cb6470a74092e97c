"""`LocalIndexCache`: indexes of remote segments in local files, so that a restart or a small memory costs no GET.

    <folder>/<topic>-<partition>-<topic id>/<base>.remoteLogIndex, ...     see tiers/segment/local_index_files.py

* Whoever has read a segment's index from the store appends it. A set of files is rolled by size and by age, and
  belongs to the process that began it: what an earlier process left is read, never continued.
* All sets together stay below `max_bytes`; the set that was used longest ago goes first. A set that contradicts itself
  goes at once, and what it held is fetched from the store again. The same goes for a disk that fails.
* One process has the folder, one thread at a time works on it. What finds it taken, or full, does without.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tiers.errors import CorruptSegmentError, EncryptionKeyError
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes_object import IndexesObject, SegmentCiphers, decode_indexes_object
from tiers.segment.local_index_files import OFFSET_INDEX, SUFFIXES, Append, LocalIndexFiles, append_to
from tiers.segment.segment_index import SegmentIndex

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_NAME = re.compile(rf"(\d{{20}})({'|'.join(map(re.escape, SUFFIXES))})")
_MAX_TOPIC_CHARACTERS = 200
"""Of 249: the name of a folder has 255, and the topic id says which topic it is."""


@dataclass(frozen=True, slots=True)
class LocalIndexSettings:
    """`max_bytes` for everything; a set is rolled when its remoteLogIndex has `roll_bytes`, or at `roll_ms`."""

    folder: Path
    max_bytes: int = 1 << 30
    roll_bytes: int = 1 << 20
    roll_ms: int = 3_600_000


@dataclass(slots=True)
class _Set:
    files: LocalIndexFiles
    began_ms: int | None
    """None: by an earlier process."""


class LocalIndexCache:
    """Not for an event loop: calls block on the disk. What the disk or the files do, no call raises."""

    def __init__(
        self,
        settings: LocalIndexSettings,
        clock_ms: Callable[[], int],
        ciphers: SegmentCiphers | None = None,
        append: Append = append_to,
    ) -> None:
        self._settings = settings
        self._clock_ms = clock_ms
        self._ciphers = ciphers
        self._append = append
        self._busy = threading.Lock()
        self._sets: dict[Path, _Set] = {}
        """By path without suffix, the longest unused first."""
        self._stems: dict[Path, dict[Path, None]] = {}
        """The same by folder."""
        self._is_loaded = False
        self.size_bytes = 0

    def get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        """The index, and how many bytes it takes; None when it is not here."""
        return self._alone(lambda: self._get(segment))

    def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        """`raw` is the stored object of a segment that is not here. Raises `CorruptSegmentError` if it is not whole."""
        indexes = decode_indexes_object(raw, segment)
        self._alone(lambda: self._put(indexes))

    def _alone(self, work: Callable[[], T | None]) -> T | None:
        """A call that the disk does not let go has the files until it comes back."""
        if not self._busy.acquire(blocking=False):
            return None
        try:
            if not self._is_loaded:
                self._load()
                self._is_loaded = True
            return work()
        except OSError as error:
            _LOG.warning("local index files cannot be read or written", extra={"error": str(error)})
            return None
        finally:
            self._busy.release()

    def _get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        for stem in reversed([*self._stems.get(self._folder(segment.topic_id_partition), ())]):
            files = self._sets[stem].files
            try:
                found = files.find(segment, self._ciphers)
            except EncryptionKeyError:  # the store may have it under another key by now
                continue
            except (CorruptSegmentError, OSError) as error:
                _LOG.warning("local index files are given up", extra={"path": str(stem), "error": str(error)})
                self._remove(stem)
                continue
            if found is not None:
                self._add(stem, self._sets[stem])
                with contextlib.suppress(OSError):
                    os.utime(files.path(OFFSET_INDEX))
                return found
        return None

    def _put(self, indexes: IndexesObject) -> None:
        segment = indexes.metadata
        folder = self._folder(segment.topic_id_partition)
        stem = self._stem_that_takes(folder, segment) or self._begin(folder, segment.start_offset)
        files = self._sets[stem].files
        self.size_bytes -= files.size_bytes
        try:
            files.append(indexes)
        except OSError:
            self.size_bytes += files.size_bytes
            self._remove(stem)
            raise
        self.size_bytes += files.size_bytes
        self._add(stem, self._sets[stem])
        self._shrink()

    def _shrink(self) -> None:
        while self.size_bytes > self._settings.max_bytes:
            self._remove(next(iter(self._sets)))

    def _stem_that_takes(self, folder: Path, segment: RemoteLogSegmentMetadata) -> Path | None:
        """Of those that can, the one that ends nearest: readers at several places go on in a set each."""
        now_ms = self._clock_ms()
        fit = [
            (one.files.last_offset, stem)
            for stem, one in ((stem, self._sets[stem]) for stem in self._stems.get(folder, ()))
            if one.began_ms is not None
            and now_ms - one.began_ms < self._settings.roll_ms
            and one.files.takes(segment, self._settings.roll_bytes)
        ]
        return max(fit)[1] if fit else None

    def _begin(self, folder: Path, base_offset: int) -> Path:
        """In the place of a set of that name."""
        stem = folder / f"{base_offset:020}"
        if stem in self._sets:
            self._remove(stem)
        folder.mkdir(parents=True, exist_ok=True)
        files = LocalIndexFiles(folder, base_offset, self._append)
        files.remove()
        self._add(stem, _Set(files, self._clock_ms()))
        return stem

    def _add(self, stem: Path, one: _Set) -> None:
        """As the one used last."""
        self._sets.pop(stem, None)
        self._sets[stem] = one
        stems = self._stems.setdefault(stem.parent, {})
        stems.pop(stem, None)
        stems[stem] = None

    def _remove(self, stem: Path) -> None:
        files = self._sets.pop(stem).files
        stems = self._stems[stem.parent]
        del stems[stem]
        if not stems:
            del self._stems[stem.parent]
        self.size_bytes -= files.size_bytes
        with contextlib.suppress(OSError):
            files.remove()
            files.folder.rmdir()  # not while another set is there

    def _load(self) -> None:
        """Those that are whole; what is left of others is removed."""
        found: dict[Path, set[str]] = {}
        self._settings.folder.mkdir(parents=True, exist_ok=True)
        for path in self._settings.folder.glob("*/*"):
            if named := _NAME.fullmatch(path.name):
                found.setdefault(path.parent / named[1], set()).add(named[2])
        known: list[tuple[float, Path, LocalIndexFiles]] = []
        for stem, suffixes in found.items():
            try:
                if len(suffixes) < len(SUFFIXES):
                    raise CorruptSegmentError(f"{stem} has only {', '.join(suffixes)}")
                files = LocalIndexFiles.existing(stem.parent, int(stem.name))
                known.append((files.path(OFFSET_INDEX).stat().st_mtime, stem, files))
            except (CorruptSegmentError, OSError):
                with contextlib.suppress(OSError):
                    LocalIndexFiles(stem.parent, int(stem.name)).remove()
        for _, stem, files in sorted(known, key=lambda entry: entry[:2]):
            self._add(stem, _Set(files, None))
            self.size_bytes += files.size_bytes
        self._shrink()

    def _folder(self, partition: TopicIdPartition) -> Path:
        name = f"{partition.topic[:_MAX_TOPIC_CHARACTERS]}-{partition.partition}-{partition.topic_id}"
        return self._settings.folder / name
