"""The caches of chunks: verified ones in memory, and stored ones on a local disk. Both are LRU by bytes.

The chunk cache in memory holds and evicts extents. An extent is the run of adjacent chunks that
one GET read. Their views share one buffer, so only the eviction of a whole extent releases memory.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any, NamedTuple, Self
from uuid import UUID

from protocol.records.record_batch import crc32c
from tiers.storage.activity import BlockingCalls, Call

logger = logging.getLogger(__name__)

_MAGIC = b"TGCH"
_HEADER = Struct(">4sI16si")
_NAME = re.compile(r"([0-9a-f]{32})-(\d{1,10})")
_TORN = ".part"
_BLOCK_BYTES = 4096
_READ_THREADS = 4
_READ_DEADLINE_S = 1.0
_WRITE_DEADLINE_S = 30.0
_LOAD_DEADLINE_S = 600.0
_MAX_PENDING_BYTES = 64 << 20
"""The limit of the chunks that wait to be written."""
_REST_MS = 60_000
"""How long the cache does not use a disk that failed."""


class ChunkKey(NamedTuple):
    """The key of a chunk. `segment` is the uuid of the copy attempt, so a key always stands for the same bytes."""

    segment: UUID
    number: int


@dataclass(frozen=True, slots=True)
class Extent:
    """The chunks `[first_number, first_number + len(chunks))` of one segment: log bytes with verified checksums.

    `size_bytes` is the memory that the views keep alive."""

    segment: UUID
    first_number: int
    chunks: tuple[memoryview, ...]
    size_bytes: int

    @property
    def key(self) -> ChunkKey:
        """The key of the first chunk."""
        return ChunkKey(self.segment, self.first_number)

    def chunk_keys(self) -> list[ChunkKey]:
        return [ChunkKey(self.segment, number) for number, _ in enumerate(self.chunks, self.first_number)]


class ChunkCache:
    """The cache of verified chunks. A view that `get` returned stays valid after the eviction of its extent."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._extents: OrderedDict[ChunkKey, Extent] = OrderedDict()
        """By the keys of their first chunks, the least recently used first."""
        self._extent_of: dict[ChunkKey, Extent] = {}
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0

    def __contains__(self, key: ChunkKey) -> bool:
        """Returns whether the chunk is cached. Counts neither as a use nor as a hit."""
        return key in self._extent_of

    def end_number(self, key: ChunkKey) -> int | None:
        """Returns the number after the last chunk of the extent that has this chunk; None when it is not cached.

        Counts neither as a use nor as a hit."""
        extent = self._extent_of.get(key)
        return None if extent is None else extent.first_number + len(extent.chunks)

    def get(self, key: ChunkKey) -> memoryview | None:
        extent = self._extent_of.get(key)
        if extent is None:
            self.misses += 1
            return None
        self.hits += 1
        self._extents.move_to_end(extent.key)
        return extent.chunks[key.number - extent.first_number]

    def put(self, extent: Extent) -> None:
        """Caches the extent unless it is larger than the whole cache. None of its chunks may be cached already."""
        if extent.size_bytes > self._max_bytes:
            return
        while self.size_bytes + extent.size_bytes > self._max_bytes:
            _, evicted = self._extents.popitem(last=False)
            self.size_bytes -= evicted.size_bytes
            for key in evicted.chunk_keys():
                del self._extent_of[key]
        self.size_bytes += extent.size_bytes
        self._extents[extent.key] = extent
        self._extent_of |= dict.fromkeys(extent.chunk_keys(), extent)


def file_bytes(chunk_bytes: int) -> int:
    """Returns the disk space of a chunk's file, in whole blocks."""
    return -(-(_HEADER.size + chunk_bytes) // _BLOCK_BYTES) * _BLOCK_BYTES


class ChunkFiles:
    """Chunks in a folder, one file per chunk, with the bytes of the store. So encrypted chunks stay so.

        <folder>/<segment uuid, hex>-<chunk number>
        magic "TGCH" | CRC-32C uint32 of the stored bytes | segment uuid | chunk number int32 | stored bytes

    A rename makes a complete file appear, but the file is not synced. After a crash, a torn file fails its checksum and
    counts as missing. The modification time of a file is the time of its last use. Only one process may use the folder.
    Calls block on the disk and raise its `OSError`s."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def load(self) -> list[tuple[ChunkKey, int]]:
        """Returns the chunks and the disk space of their files, the least recently used first.

        Removes the partial files that a crash left.
        """
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found: list[tuple[float, ChunkKey, int]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if named := _NAME.fullmatch(entry.name):
                    stat = entry.stat()
                    key = ChunkKey(UUID(named[1]), int(named[2]))
                    found.append((stat.st_mtime, key, file_bytes(max(stat.st_size - _HEADER.size, 0))))
                elif entry.name.endswith(_TORN):
                    Path(entry.path).unlink(missing_ok=True)
        return [(key, size) for _, key, size in sorted(found)]

    def read(self, keys: Sequence[ChunkKey]) -> list[memoryview]:
        """Returns the stored bytes of the first `keys`, up to the first chunk that is missing or damaged."""
        found: list[memoryview] = []
        for key in keys:
            path = self._path(key)
            try:
                with path.open("rb", buffering=0) as file:
                    data = memoryview(file.readall())
                    os.utime(file.fileno())
            except FileNotFoundError:
                break
            if len(data) < _HEADER.size or _HEADER.unpack_from(data) != _header(key, data[_HEADER.size :]):
                logger.warning("a chunk file is damaged and is not used", extra={"path": str(path)})
                break
            found.append(data[_HEADER.size :])
        return found

    def write(self, key: ChunkKey, stored: memoryview, check: Callable[[], None]) -> None:
        """Writes a chunk. Calls `check` before the file appears; if `check` raises, there is no file."""
        path = self._path(key)
        torn = path.with_name(path.name + _TORN)
        try:
            with open(torn, "wb", buffering=0, opener=_private) as file:  # `Path.open` has no opener
                written = file.write(_HEADER.pack(*_header(key, stored)))
                while written < _HEADER.size + len(stored):
                    written += file.write(stored[written - _HEADER.size :])
            check()
            torn.replace(path)
        except BaseException:
            torn.unlink(missing_ok=True)
            raise

    def remove(self, keys: Sequence[ChunkKey]) -> None:
        for key in keys:
            self._path(key).unlink(missing_ok=True)

    def _path(self, key: ChunkKey) -> Path:
        return self._folder / f"{key.segment.hex}-{key.number}"


def _header(key: ChunkKey, stored: memoryview) -> tuple[bytes, int, bytes, int]:
    return _MAGIC, crc32c(stored, 0, len(stored)), key.segment.bytes, key.number


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class DiskChunkCache:
    """A second cache of chunks, in files: an asynchronous context manager for an event loop. `clock_ms` is monotonic.

    * The keys are in memory, so a miss costs no disk access. Writes never delay reads: the cache skips chunks that
      arrive faster than the disk writes. Leaving the context drops the chunks that wait to be written.
    * All files together never exceed `max_bytes`, because the cache evicts before it writes.
    * If the disk fails, is full or does not answer in time, the reader falls back to a GET, and the cache does not use
      the disk for a while. It removes damaged files.
    * The files survive a restart. Readers no longer ask for chunks of deleted segments, so those are evicted first.
    """

    def __init__(
        self, folder: Path, max_bytes: int, clock_ms: Callable[[], int], files: ChunkFiles | None = None
    ) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._clock_ms = clock_ms
        self._files = files or ChunkFiles(folder)
        self._reads = BlockingCalls("disk-chunk-reads", _READ_THREADS)
        self._writes = BlockingCalls("disk-chunk-writes", 1)
        self._sizes: OrderedDict[ChunkKey, int] = OrderedDict()
        """The chunks that can be read and the sizes of their files, the least recently used first."""
        self._being_written: dict[ChunkKey, int] = {}
        self._is_loaded = False
        self._rests_until_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._group = asyncio.TaskGroup()
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        self._spawn(self._load())
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await self._group.__aexit__(None, None, None)
        self._reads.close()
        self._writes.close()

    async def get(self, keys: Sequence[ChunkKey]) -> list[memoryview]:
        """Returns the stored bytes of the first `keys`, up to the first chunk that is missing or damaged."""
        found: list[memoryview] = []
        known = []
        for key in keys:
            if key not in self._sizes:
                break
            self._sizes.move_to_end(key)
            known.append(key)
        if known and not self._is_resting():
            try:
                found = await self._reads.run(lambda _: self._files.read(known), _READ_DEADLINE_S)
            except OSError as error:  # includes `TimeoutError`
                self._rest(error)
            else:
                self.forget(known[len(found) : len(found) + 1])
        self.hits += len(found)
        self.misses += 0 if found else len(keys)
        return found

    def put(self, first: ChunkKey, stored: Sequence[memoryview]) -> None:
        """Caches intact chunks of one segment, from `first` on. Never waits: a background task writes them."""
        if self._is_resting():
            return
        if not self._is_loaded:
            if not self._tasks:  # the last attempt to load failed
                self._spawn(self._load())
            return
        for number, view in enumerate(stored, first.number):
            key = ChunkKey(first.segment, number)
            if key in self._sizes or key in self._being_written or file_bytes(len(view)) > self._max_bytes:
                continue
            if sum(self._being_written.values()) + len(view) > _MAX_PENDING_BYTES:
                return
            self._being_written[key] = len(view)
            self._spawn(self._write(key, view))

    def forget(self, keys: Sequence[ChunkKey]) -> None:
        """Removes chunks that turned out to be unusable."""
        gone = [key for key in keys if key in self._sizes]
        for key in gone:
            self.size_bytes -= self._sizes.pop(key)
        if gone:
            self._spawn(self._remove(gone))

    async def _load(self) -> None:
        found: list[tuple[ChunkKey, int]] = []
        if not await self._in_files(lambda _: found.extend(self._files.load()), _LOAD_DEADLINE_S):
            return
        self._is_loaded = True
        self._sizes.update(found)
        self.size_bytes = sum(self._sizes.values())
        await self._remove(self._evict())

    async def _write(self, key: ChunkKey, view: memoryview) -> None:
        size = file_bytes(len(view))
        self.size_bytes += size
        evicted = [] if self._is_resting() else self._evict()
        # The other chunks in progress may take all the room that is left.
        has_room = self.size_bytes <= self._max_bytes

        def write(call: Call[None]) -> None:
            self._files.remove(evicted)
            if has_room:
                self._files.write(key, view, call.check)

        is_written = False
        try:
            is_written = not self._is_resting() and await self._in_files(write) and has_room
        finally:
            del self._being_written[key]
            if is_written:
                self._sizes[key] = size
            else:
                self.size_bytes -= size

    async def _remove(self, keys: Sequence[ChunkKey]) -> None:
        await self._in_files(lambda _: self._files.remove(keys))

    def _evict(self) -> list[ChunkKey]:
        evicted = []
        while self.size_bytes > self._max_bytes and self._sizes:
            key, size = self._sizes.popitem(last=False)
            self.size_bytes -= size
            evicted.append(key)
        return evicted

    async def _in_files(self, work: Callable[[Call[None]], None], deadline_s: float = _WRITE_DEADLINE_S) -> bool:
        """Runs `work` in the one thread that changes files, in the order of calls. Returns False on a disk error."""
        try:
            await self._writes.run(work, deadline_s)
        except OSError as error:
            self._rest(error)
            return False
        return True

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_resting(self) -> bool:
        return self._clock_ms() < self._rests_until_ms

    def _rest(self, error: OSError) -> None:
        if not self._is_resting():
            extra = {"folder": str(self._folder), "error": str(error) or type(error).__name__}
            logger.warning("the disk chunk cache fails and is not used for a while; check the disk", extra=extra)
        self._rests_until_ms = self._clock_ms() + _REST_MS
