"""Keeps the indexes of remote segments in local files, to save GETs (docs/founding.md, "Local index files").

    <folder>/<topic>-<partition>/<base>.remoteLogIndex, ...   see tiers/segment/indexes/local_index_files.py

* Each folder has one writer. Readers of any process take no lock. The checks of `LocalIndexFiles.find` turn a set that
  the writer is just changing into a miss.
* The process that runs the RLM tasks writes `index` under `state.path`. After it copied a segment, it appends the
  segment's index. A process that reads segments appends each index that it read from the store to its own folder, and
  reads `index` too. The only process of a proxy without workers uses `index` for both.
* A set of files is rolled by size and by age. Only the process that began a set appends to it, so nothing is ever
  appended to a torn tail.
* A segment is found by its uuid, and only if all of its entries are whole. So no entry is used for another segment.
* A process that reads a damaged set of its own folder removes it, and so does one that gets a disk error as it writes.
  A damaged set of another process is a miss: the index from the store goes to the reader's own folder.
* All sets of a folder together stay below the configured size. The least recently used one is evicted first.
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
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from tiers.errors import CorruptSegmentError, EncryptionKeyError
from tiers.lasting_trouble import LastingTrouble
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import IndexesObject, SegmentCiphers, decode_indexes_object
from tiers.segment.indexes.local_index_files import OFFSET_INDEX, SUFFIXES, Append, LocalIndexFiles, append_to
from tiers.segment.indexes.segment_index import MAX_RELATIVE, SegmentIndex
from tiers.storage.activity import BlockingCalls, CallsClosedError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_NAME = re.compile(rf"(\d{{20}})({'|'.join(map(re.escape, SUFFIXES))})")
_MAX_SETS_OF_A_READ = 8
"""How many sets a reader opens for one segment. The first one has the segment, unless the log was cut."""
_DEADLINE_MS = 1_000
ROLL_BYTES: Final = 1 << 20
"""The size at which a partition's remoteLogIndex file is rolled."""
ROLL_MS: Final = 3_600_000
"""The age at which it is rolled."""

_SetKey = tuple[str, int]
"""The name of the partition's folder, and the base offset."""


@dataclass(slots=True)
class _Set:
    files: LocalIndexFiles
    began_ms: int | None
    """None if an earlier process began the set."""
    used_ns: int = 0
    """The time of the last use, as the writer knows it. A reader sets the file's time."""


class LocalIndexes:
    """The index files of a process, on an event loop. If the disk hangs or fails, the reader falls back to a GET.

    The calls work in a thread of their own, one at a time. There are a few more threads while calls hang in the disk.
    While one hangs, the folder is not written. No call raises for a disk error or a damaged file."""

    def __init__(
        self,
        folder: Path,
        max_bytes: int,
        clock_ms: Callable[[], int],
        ciphers: SegmentCiphers | None = None,
        *,
        shared: Path | None = None,
        append: Append = append_to,
        roll_bytes: int = ROLL_BYTES,
        roll_ms: int = ROLL_MS,
        deadline_ms: int = _DEADLINE_MS,
    ) -> None:
        """This process alone writes `folder`, up to `max_bytes`. `shared` is the folder that another process writes:
        it is read first."""
        self._root = folder
        self._max_bytes = max_bytes
        self._roll_bytes = roll_bytes
        self._roll_ms = roll_ms
        self._clock_ms = clock_ms
        self._ciphers = ciphers
        self._shared = shared
        self._append = append
        self._deadline_s = deadline_ms / 1000
        self._calls = BlockingCalls("local-indexes", 1)
        self._writes = threading.Lock()
        self._sets: dict[_SetKey, _Set] = {}
        """The sets of the folder, the least recently used first."""
        self._is_loaded = False
        self._trouble = LastingTrouble(
            logger,
            "local index files cannot be read or written; the indexes come from the store",
            "local index files can be read and written again",
            clock_ms=clock_ms,
        )
        self.size_bytes = 0
        """The bytes of the sets in the folder that this process writes."""
        self.hits = 0
        self.misses = 0

    async def get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        """Returns the index and its size in bytes; None when it is not in the files or the deadline passes."""
        damaged: list[int] = []
        found = await self._run(lambda: self._get(segment, damaged))
        for base_offset in damaged:
            key = folder_of(self._root, segment.topic_id_partition).name, base_offset
            await self._write(partial(self._remove_damaged, key))
        self.hits += found is not None
        self.misses += found is None
        return found

    async def open(self) -> None:
        """Loads the sets of earlier processes, so that `size_bytes` counts them. Other calls that write do so too."""
        await self._write(lambda: None)

    async def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        """Caches `raw`, the stored `.indexes` object. Raises `CorruptSegmentError` when it is damaged."""
        indexes = decode_indexes_object(raw, segment)
        await self._write(lambda: self._put(indexes))

    async def remove_below(self, partition: TopicIdPartition, offset: int) -> None:
        """Removes the sets of the partition that end below `offset`: the remote log begins there now."""
        await self._write(lambda: self._remove_below(partition, offset))

    def close(self) -> None:
        """Later calls have no effect. Safe to call twice."""
        self._calls.close()

    async def _run(self, work: Callable[[], T | None]) -> T | None:
        try:
            return await self._calls.run(lambda _: work(), self._deadline_s)
        except (TimeoutError, CallsClosedError):
            return None

    async def _write(self, work: Callable[[], None]) -> None:
        """Runs `work` unless another call is busy. A call that hangs in the disk stays busy."""

        def alone() -> None:
            if not self._writes.acquire(blocking=False):
                return
            try:
                self._load()
                work()
            except OSError as error:
                self._trouble.found(error=str(error))
            finally:
                self._writes.release()

        await self._run(alone)

    def _get(self, segment: RemoteLogSegmentMetadata, damaged: list[int]) -> tuple[SegmentIndex, int] | None:
        found = None if self._shared is None else _find(self._shared, segment, self._ciphers, [])
        return found or _find(self._root, segment, self._ciphers, damaged)

    def _load(self) -> None:
        """Loads the complete sets of earlier processes and removes the files of incomplete ones."""
        if self._is_loaded:
            return
        self._root.mkdir(parents=True, exist_ok=True)
        names = ((path.parent.name, _NAME.fullmatch(path.name)) for path in self._root.glob("*/*"))
        known: list[tuple[int, _SetKey, LocalIndexFiles]] = []
        for folder, base_offset in {(folder, int(named[1])) for folder, named in names if named}:
            try:
                files = LocalIndexFiles.existing(self._root / folder, base_offset)
                known.append((_used_ns(files), (folder, base_offset), files))
            except (CorruptSegmentError, OSError):
                with contextlib.suppress(OSError):
                    LocalIndexFiles(self._root / folder, base_offset).remove()
        for _, key, files in sorted(known, key=lambda entry: entry[:2]):
            self._use(key, _Set(files, None))
            self.size_bytes += files.size_bytes
        self._shrink()
        self._is_loaded = True

    def _remove_damaged(self, key: _SetKey) -> None:
        if key in self._sets:
            path = str(self._sets[key].files.path(""))
            logger.warning("removing damaged local index files", extra={"path": path})
            self._remove(key)

    def _put(self, indexes: IndexesObject) -> None:
        segment = indexes.metadata
        if segment.end_offset - segment.start_offset > MAX_RELATIVE:
            return  # no set can hold such a hole
        key = self._set_that_takes(segment) or self._begin(segment)
        one = self._sets[key]
        self.size_bytes -= one.files.size_bytes
        try:
            one.files.append(indexes)
        except OSError:
            self.size_bytes += one.files.size_bytes
            self._remove(key)
            raise
        self.size_bytes += one.files.size_bytes
        self._use(key, one)
        self._trouble.ended()  # a full disk can still be read, so only an append shows that the trouble is over
        self._shrink()

    def _set_that_takes(self, segment: RemoteLogSegmentMetadata) -> _SetKey | None:
        """Returns the set that can take the segment and ends nearest before it; None when no set can take it.

        So concurrent readers at different offsets each append to their own set.
        """
        began_after_ms = self._clock_ms() - self._roll_ms
        fit = [
            (one.files.last_offset, key)
            for key, one in self._sets_of(segment.topic_id_partition)
            if one.began_ms is not None and one.began_ms > began_after_ms and one.files.takes(segment, self._roll_bytes)
        ]
        return max(fit)[1] if fit else None

    def _begin(self, segment: RemoteLogSegmentMetadata) -> _SetKey:
        """Begins a set. Removes an existing set with the same name."""
        folder = folder_of(self._root, segment.topic_id_partition)
        key = folder.name, segment.start_offset
        if key in self._sets:
            self._remove(key)
        folder.mkdir(parents=True, exist_ok=True)
        files = LocalIndexFiles(folder, segment.start_offset, self._append)
        files.remove()
        self._use(key, _Set(files, self._clock_ms()))
        return key

    def _use(self, key: _SetKey, one: _Set) -> None:
        """Adds the set, or moves it to the end, as the most recently used one."""
        one.used_ns = _used_ns(one.files)
        self._sets.pop(key, None)
        self._sets[key] = one

    def _shrink(self) -> None:
        spared = len(self._sets)
        while self.size_bytes > self._max_bytes:
            key, one = next(iter(self._sets.items()))
            if _used_ns(one.files) > one.used_ns and spared > 0:  # it was read meanwhile
                spared -= 1
                self._use(key, one)
            else:
                self._remove(key)

    def _remove_below(self, partition: TopicIdPartition, offset: int) -> None:
        for key, one in self._sets_of(partition):
            if one.files.last_offset < offset:
                self._remove(key)

    def _sets_of(self, partition: TopicIdPartition) -> list[tuple[_SetKey, _Set]]:
        name = folder_of(self._root, partition).name
        return [(key, one) for key, one in self._sets.items() if key[0] == name]

    def _remove(self, key: _SetKey) -> None:
        files = self._sets.pop(key).files
        self.size_bytes -= files.size_bytes
        with contextlib.suppress(OSError):
            files.remove()
            files.folder.rmdir()  # fails while the folder has another set


def folder_of(root: Path, partition: TopicIdPartition) -> Path:
    """Returns the folder of a partition's sets. A topic that was created anew has the same folder, but other uuids."""
    return root / f"{partition.topic}-{partition.partition}"


def _find(
    root: Path, segment: RemoteLogSegmentMetadata, ciphers: SegmentCiphers | None, damaged: list[int]
) -> tuple[SegmentIndex, int] | None:
    """Returns the index and its size in bytes; None when the folder does not have it. Opens the nearest sets first.

    Adds the base offsets of the sets that look damaged to `damaged`."""
    folder = folder_of(root, segment.topic_id_partition)
    try:
        names = [_NAME.fullmatch(path.name) for path in folder.iterdir()]
    except OSError:
        return None
    bases = (int(named[1]) for named in names if named and named[2] == OFFSET_INDEX)
    for base_offset in sorted((base for base in bases if base <= segment.start_offset), reverse=True)[
        :_MAX_SETS_OF_A_READ
    ]:
        try:
            files = LocalIndexFiles.existing(folder, base_offset)
            found = files.find(segment, ciphers)
        except EncryptionKeyError:  # the store may have the index with another wrapping key by now
            continue
        except (CorruptSegmentError, OSError):
            damaged.append(base_offset)
            continue
        if found is not None:
            # It survives a restart, and the writer sees it. The kernel's own time of a write is coarser than this.
            now_ns = time.time_ns()
            with contextlib.suppress(OSError):
                os.utime(files.path(OFFSET_INDEX), ns=(now_ns, now_ns))
            return found
    return None


def _used_ns(files: LocalIndexFiles) -> int:
    try:
        return files.path(OFFSET_INDEX).stat().st_mtime_ns
    except OSError:
        return 0
