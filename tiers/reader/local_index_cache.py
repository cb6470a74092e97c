"""Keeps the indexes of remote segments in local files, to save GETs (docs/founding.md, "Local index files").

    <folder>/<topic>-<partition>/<base>.remoteLogIndex, ...   see tiers/segment/indexes/local_index_files.py

* `LocalIndexCache` writes and reads one folder. Each folder has one writer, and one thread at a time works on it. If
  another thread is busy in the folder or the disk fails, a call has no effect.
* The process that runs the RLM tasks writes `index` under `state.path`. After it copied a segment, it appends the
  segment's index. The workers read that folder through `SharedIndexFiles`, without a lock and without writing to it.
* A process that reads segments appends each index that it read from the store to its own folder. The only process of a
  proxy without workers uses `index` for both.
* A set of files is rolled by size and by age. Only the process that began a set appends to it; a later process only
  reads the set. So nothing is ever appended to a torn tail.
* A segment is found by its uuid, and only if all of its entries are whole. So an entry of a segment that was cut,
  deleted or copied again by another owner is never used for another segment.
* A worker that finds damage in `index` names the set in `index/damaged`. The writer checks that set in its next call,
  and removes it if it is damaged.
* All sets of a folder together stay below the configured size. The cache evicts the least recently used set first. It
  removes an inconsistent set at once, and the reader fetches those indexes from the store again. The same applies to a
  set after a disk error.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tiers.config.settings import RemoteLogConfig
from tiers.errors import CorruptSegmentError, EncryptionKeyError
from tiers.lasting_trouble import LastingTrouble
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import IndexesObject, SegmentCiphers, decode_indexes_object
from tiers.segment.indexes.kafka_indexes import MAX_RELATIVE
from tiers.segment.indexes.local_index_files import OFFSET_INDEX, SUFFIXES, Append, LocalIndexFiles, append_to
from tiers.segment.indexes.segment_index import SegmentIndex
from tiers.storage.blocking_calls import BlockingCalls, CallsClosedError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NAME = re.compile(rf"(\d{{20}})({'|'.join(map(re.escape, SUFFIXES))})")
_DAMAGED = "damaged"
"""The folder, beside those of the partitions, in which readers name the sets that look damaged."""
_MAX_SHARED_SETS = 8
"""How many sets `SharedIndexFiles` opens for one segment. The first one has the segment, unless the log was cut."""


@dataclass(slots=True)
class _Set:
    files: LocalIndexFiles
    began_ms: int | None
    """None if an earlier process began the set."""
    used_ns: int = 0
    """The time of the last use, as the writer knows it. A reader in another process sets the file's time."""


class LocalIndexCache:
    """The cache. Its calls block on the disk, so they must not run on an event loop.

    No call raises for a disk error or a damaged file; such an error is a cache miss."""

    def __init__(
        self,
        folder: Path,
        remote_log: RemoteLogConfig,
        clock_ms: Callable[[], int],
        ciphers: SegmentCiphers | None = None,
        append: Append = append_to,
    ) -> None:
        self._root = folder
        self._remote_log = remote_log
        self._clock_ms = clock_ms
        self._ciphers = ciphers
        self._append = append
        self._busy = threading.Lock()
        self._sets: dict[Path, _Set] = {}
        """The sets by path without suffix, the least recently used first."""
        self._stems: dict[Path, dict[Path, None]] = {}
        """The keys of `_sets` by folder, in the same order."""
        self._is_loaded = False
        self._trouble = LastingTrouble(
            logger,
            "local index files cannot be read or written; the indexes come from the store",
            "local index files can be read and written again",
            clock_ms=clock_ms,
        )
        self.size_bytes = 0

    def get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        """Returns the index and its size in bytes; None when the cache does not have it."""
        return self._alone(lambda: self._get(segment))

    def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        """Caches `raw`, the stored `.indexes` object of a segment that the cache does not have.

        Raises `CorruptSegmentError` when `raw` is damaged.
        """
        indexes = decode_indexes_object(raw, segment)
        self._alone(lambda: self._put(indexes))

    def open(self) -> None:
        """Loads the sets of earlier processes. Every other call does so too if it comes first."""
        self._alone(lambda: None)

    def remove_below(self, partition: TopicIdPartition, offset: int) -> None:
        """Removes the sets of the partition that end below `offset`: the remote log begins there now."""
        self._alone(lambda: self._remove_below(partition, offset))

    def _alone(self, work: Callable[[], T | None]) -> T | None:
        """Runs `work` unless another call is busy; returns None otherwise. A call that hangs in the disk stays busy."""
        if not self._busy.acquire(blocking=False):
            return None
        try:
            if not self._is_loaded:
                self._load()
                self._is_loaded = True
            self._check_named_sets()
            return work()
        except OSError as error:
            self._trouble.found(error=str(error))
            return None
        finally:
            self._busy.release()

    def _check_named_sets(self) -> None:
        """Checks the sets that readers named, and removes the damaged ones.

        A reader may have met the set while it was appended to, or an earlier set of the same name."""
        try:
            named = [*(self._root / _DAMAGED).iterdir()]
        except OSError:  # as a rule there is no such folder
            return
        for path in named:
            path.unlink(missing_ok=True)
            folder, _, base_offset = path.name.rpartition(".")
            stem = self._root / folder / base_offset
            if stem in self._sets:
                try:
                    self._sets[stem].files.check()
                except (CorruptSegmentError, OSError) as error:
                    self._remove_damaged(stem, error)

    def _remove_damaged(self, stem: Path, error: Exception) -> None:
        logger.warning("removing damaged local index files", extra={"path": str(stem), "error": str(error)})
        self._remove(stem)

    def _get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        for stem in reversed([*self._stems.get(self._folder(segment.topic_id_partition), ())]):
            files = self._sets[stem].files
            try:
                found = files.find(segment, self._ciphers)
            except EncryptionKeyError:  # the store may have the index with another wrapping key by now
                continue
            except (CorruptSegmentError, OSError) as error:
                self._remove_damaged(stem, error)
                continue
            if found is not None:
                _note_use(files)
                self._add(stem, self._sets[stem])
                return found
        return None

    def _put(self, indexes: IndexesObject) -> None:
        segment = indexes.metadata
        if segment.end_offset - segment.start_offset > MAX_RELATIVE:
            return  # no set can hold such a hole
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
        self._trouble.ended()  # a full disk can still be read, so only an append shows that the trouble is over
        self._shrink()

    def _shrink(self) -> None:
        spared = len(self._sets)
        while self.size_bytes > self._remote_log.index_file_cache_bytes:
            stem, one = next(iter(self._sets.items()))
            used_ns = _used_ns(one.files)
            if used_ns > one.used_ns and spared > 0:  # another process has read it
                one.used_ns, spared = used_ns, spared - 1
                self._add(stem, one)
            else:
                self._remove(stem)

    def _remove_below(self, partition: TopicIdPartition, offset: int) -> None:
        for stem in [*self._stems.get(self._folder(partition), ())]:
            if self._sets[stem].files.last_offset < offset:
                self._remove(stem)

    def _stem_that_takes(self, folder: Path, segment: RemoteLogSegmentMetadata) -> Path | None:
        """Returns the set that can take the segment and ends nearest before it; None when no set can take it.

        So concurrent readers at different offsets each append to their own set.
        """
        now_ms = self._clock_ms()
        fit = [
            (one.files.last_offset, stem)
            for stem, one in ((stem, self._sets[stem]) for stem in self._stems.get(folder, ()))
            if one.began_ms is not None
            and now_ms - one.began_ms < self._remote_log.index_file_roll_ms
            and one.files.takes(segment, self._remote_log.index_file_roll_bytes)
        ]
        return max(fit)[1] if fit else None

    def _begin(self, folder: Path, base_offset: int) -> Path:
        """Begins a set. Removes an existing set with the same name."""
        stem = folder / f"{base_offset:020}"
        if stem in self._sets:
            self._remove(stem)
        folder.mkdir(parents=True, exist_ok=True)
        files = LocalIndexFiles(folder, base_offset, self._append)
        files.remove()
        self._add(stem, _Set(files, self._clock_ms()))
        return stem

    def _add(self, stem: Path, one: _Set) -> None:
        """Adds the set, or moves it to the end, as the most recently used one."""
        one.used_ns = _used_ns(one.files)
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
            files.folder.rmdir()  # fails while the folder has another set

    def _load(self) -> None:
        """Loads the complete sets of earlier processes and removes the files of incomplete ones."""
        found: dict[Path, set[str]] = {}
        self._root.mkdir(parents=True, exist_ok=True)
        for path in self._root.glob("*/*"):
            if named := _NAME.fullmatch(path.name):
                found.setdefault(path.parent / named[1], set()).add(named[2])
        known: list[tuple[int, Path, LocalIndexFiles]] = []
        for stem, suffixes in found.items():
            try:
                if len(suffixes) < len(SUFFIXES):
                    raise CorruptSegmentError(f"{stem}: the set has only the files {', '.join(suffixes)}")
                files = LocalIndexFiles.existing(stem.parent, int(stem.name))
                known.append((_used_ns(files), stem, files))
            except (CorruptSegmentError, OSError):
                with contextlib.suppress(OSError):
                    LocalIndexFiles(stem.parent, int(stem.name)).remove()
        for _, stem, files in sorted(known, key=lambda entry: entry[:2]):
            self._add(stem, _Set(files, None))
            self.size_bytes += files.size_bytes
        self._shrink()

    def _folder(self, partition: TopicIdPartition) -> Path:
        return folder_of(self._root, partition)


class SharedIndexFiles:
    """Reads the folder that another process writes. Its calls block on the disk.

    Without a lock, a reader may see a set that the writer is just appending to, removing or beginning anew. The checks
    of `LocalIndexFiles.find` turn that into a miss. No call raises for a disk error or a damaged file."""

    def __init__(self, folder: Path, ciphers: SegmentCiphers | None = None) -> None:
        self._root = folder
        self._ciphers = ciphers

    def get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        """Returns the index and its size in bytes; None when the files do not have it."""
        folder = folder_of(self._root, segment.topic_id_partition)
        for base_offset in self._base_offsets(folder, segment.start_offset)[:_MAX_SHARED_SETS]:
            try:
                files = LocalIndexFiles.existing(folder, base_offset)
                found = files.find(segment, self._ciphers)
            except EncryptionKeyError:
                continue
            except (CorruptSegmentError, OSError):
                self._name_damaged(folder, base_offset)
                continue
            if found is not None:
                _note_use(files)
                return found
        return None

    def _name_damaged(self, folder: Path, base_offset: int) -> None:
        """Asks the writer of the folder to check a set. The writer alone removes files, since it may append to them."""
        with contextlib.suppress(OSError):
            (self._root / _DAMAGED).mkdir(exist_ok=True)
            (self._root / _DAMAGED / f"{folder.name}.{base_offset:020}").touch()

    def _base_offsets(self, folder: Path, start_offset: int) -> list[int]:
        """Returns the base offsets of the sets that may have a segment from `start_offset` on, the nearest first."""
        try:
            names = [path.name for path in folder.iterdir()]
        except OSError:
            return []
        found = (
            int(name[: -len(OFFSET_INDEX)]) for name in names if name.endswith(OFFSET_INDEX) and _NAME.fullmatch(name)
        )
        return sorted((base for base in found if base <= start_offset), reverse=True)


def folder_of(root: Path, partition: TopicIdPartition) -> Path:
    """Returns the folder of a partition's sets. A topic that was created anew has the same folder, but other uuids."""
    return root / f"{partition.topic}-{partition.partition}"


def _used_ns(files: LocalIndexFiles) -> int:
    try:
        return files.path(OFFSET_INDEX).stat().st_mtime_ns
    except OSError:
        return 0


def _note_use(files: LocalIndexFiles) -> None:
    """Sets the time of the last use. It survives a restart, and the writer of the folder sees it."""
    now_ns = time.time_ns()  # the kernel's own time of a write is coarser, so a use is always later
    with contextlib.suppress(OSError):
        os.utime(files.path(OFFSET_INDEX), ns=(now_ns, now_ns))


DEADLINE_MS = 1_000


class LocalIndexes:
    """Makes `LocalIndexCache` usable on an event loop. If the disk hangs, the reader falls back to a GET.

    The cache is used in a thread of its own. It adds a few threads while calls hang in the disk."""

    def __init__(
        self, cache: LocalIndexCache, deadline_ms: int = DEADLINE_MS, shared: SharedIndexFiles | None = None
    ) -> None:
        """`shared` are the files that another process writes. They are asked first."""
        self.cache = cache
        self._shared = shared
        self.hits = 0
        self.misses = 0
        self._deadline_s = deadline_ms / 1000
        self._calls = BlockingCalls("local-indexes", 1)

    async def get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        """Returns the index and its size in bytes; None when it is not in the files or the deadline passes."""
        found = await self._run(lambda: self._get(segment))
        self.hits += found is not None
        self.misses += found is None
        return found

    def _get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        found = None if self._shared is None else self._shared.get(segment)
        return self.cache.get(segment) if found is None else found

    async def open(self) -> None:
        """Loads the sets of earlier processes, so that `cache.size_bytes` counts them."""
        await self._run(self.cache.open)

    async def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        """Caches `raw`, the stored object. `raw` must be intact."""
        await self._run(lambda: self.cache.put(segment, raw))

    async def remove_below(self, partition: TopicIdPartition, offset: int) -> None:
        """Removes the sets of the partition that end below `offset`."""
        await self._run(lambda: self.cache.remove_below(partition, offset))

    async def _run(self, work: Callable[[], T | None]) -> T | None:
        try:
            return await self._calls.run(lambda _: work(), self._deadline_s)
        except (TimeoutError, CallsClosedError):
            return None

    def close(self) -> None:
        """Later calls have no effect. Safe to call twice."""
        self._calls.close()
