"""`DiskChunkCache`: a second cache of chunks, on a local disk, LRU by bytes, for an event loop.

* The keys are in memory, so a miss costs no disk access. The cache reads and writes files in its own few threads.
  Writes never delay reads: the cache skips chunks that arrive faster than the disk writes.
* All files together never exceed `max_bytes`, because the cache evicts before it writes.
* The cache is optional. If the disk fails, is full or does not answer in time, the reader falls back to a GET, and the
  cache does not use the disk for a while. It removes damaged files.
* The files survive a restart. Readers no longer ask for chunks of deleted segments, so those are evicted first.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tiers.reader.chunk_cache import ChunkKey
from tiers.reader.chunk_files import ChunkFiles, file_bytes
from tiers.storage.blocking_calls import BlockingCalls, Call

logger = logging.getLogger(__name__)

_READ_THREADS = 4
_READ_DEADLINE_S = 1.0
_WRITE_DEADLINE_S = 30.0
_LOAD_DEADLINE_S = 600.0


@dataclass(frozen=True, slots=True)
class DiskChunkCacheSettings:
    """The settings. Only one process may use `folder`; `max_pending_bytes` limits the chunks that wait for a write."""

    folder: Path
    max_bytes: int
    max_pending_bytes: int = 64 << 20
    rest_ms: int = 60_000
    """How long the cache does not use a disk that failed."""


class DiskChunkCache:
    """An asynchronous context manager; leaving it drops the chunks that wait to be written. `clock_ms` is monotonic."""

    def __init__(
        self, settings: DiskChunkCacheSettings, clock_ms: Callable[[], int], files: ChunkFiles | None = None
    ) -> None:
        self._settings = settings
        self._clock_ms = clock_ms
        self._files = files or ChunkFiles(settings.folder)
        self._reads = BlockingCalls("disk-chunk-reads", _READ_THREADS)
        self._writes = BlockingCalls("disk-chunk-writes", 1)
        self._sizes: OrderedDict[ChunkKey, int] = OrderedDict()
        """The chunks that can be read and the sizes of their files, the least recently used first."""
        self._being_written: set[ChunkKey] = set()
        self._pending_bytes = 0
        self._is_loaded = False
        self._rests_until_ms: int | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self.size_bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    async def __aenter__(self) -> Self:
        self._group = asyncio.TaskGroup()
        await self._group.__aenter__()
        self._spawn(self._load())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        group, self._group = self._group, None
        for task in self._tasks:
            task.cancel()
        if group is not None:
            await group.__aexit__(None, None, None)
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
            if key in self._sizes or key in self._being_written or file_bytes(len(view)) > self._settings.max_bytes:
                continue
            if self._pending_bytes + len(view) > self._settings.max_pending_bytes:
                return
            self._pending_bytes += len(view)
            self._being_written.add(key)
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
        evicted = self._evict()
        await self._remove(evicted)

    async def _write(self, key: ChunkKey, view: memoryview) -> None:
        size = file_bytes(len(view))
        self.size_bytes += size
        evicted = [] if self._is_resting() else self._evict()
        # The other chunks in progress may take all the room that is left.
        has_room = self.size_bytes <= self._settings.max_bytes

        def write(call: Call[None]) -> None:
            self._files.remove(evicted)
            if has_room:
                self._files.write(key, view, call.check)

        is_written = False
        try:
            is_written = not self._is_resting() and await self._in_files(write) and has_room
        finally:
            self._pending_bytes -= len(view)
            self._being_written.discard(key)
            if is_written:
                self._sizes[key] = size
            else:
                self.size_bytes -= size

    async def _remove(self, keys: Sequence[ChunkKey]) -> None:
        await self._in_files(lambda _: self._files.remove(keys))

    def _evict(self) -> list[ChunkKey]:
        evicted = []
        while self.size_bytes > self._settings.max_bytes and self._sizes:
            key, size = self._sizes.popitem(last=False)
            self.size_bytes -= size
            evicted.append(key)
        self.evictions += len(evicted)
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
        assert self._group is not None
        task = self._group.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _is_resting(self) -> bool:
        return self._rests_until_ms is not None and self._clock_ms() < self._rests_until_ms

    def _rest(self, error: OSError) -> None:
        if not self._is_resting():
            extra = {"folder": str(self._settings.folder), "error": str(error) or type(error).__name__}
            logger.warning("the disk chunk cache fails and is not used for a while; check the disk", extra=extra)
        self._rests_until_ms = self._clock_ms() + self._settings.rest_ms
