"""`SimStore`: a store with latency, errors, lost answers and late visibility. Every process has its own `SimStorage`.

A request that has left takes effect, whatever happens to the process that sent it. A copy is two requests.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

from tests.support.simulation.loop import VirtualLoop, current_process
from tiers.errors import RemoteLogError, RemoteResourceNotFoundError, RetriableRemoteStorageError
from tiers.metadata.partition_facts import PartitionFacts, decode_partition_facts
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.storage.object_key import indexes_key, log_key, parse_segment_key
from tiers.storage.remote_storage_manager import (
    LogSegmentData,
    StoredObject,
    check_range,
)

T = TypeVar("T")
_TIMEOUT_S = 10.0
_KEYS_PER_PAGE = 1_000
_LATEST_PUT_S = 14.0
"""Less than half of the time for which the metadata keeps a deleted segment."""
decoded_facts = lru_cache(maxsize=64)(decode_partition_facts)


@dataclass
class _Object:
    data: bytes
    visible_at_s: float
    """When others than the writer see the object."""
    writer: str


class SimStore:
    def __init__(self, loop: VirtualLoop, rng: random.Random) -> None:
        self.loop = loop
        self.rng = rng
        self.objects: dict[str, _Object] = {}
        self.is_down = False
        self.error_rate = 0.0
        self.lost_rate = 0.0
        """How probable it is that a request takes effect, but is answered an error or not at all."""
        self.truncate_rate = 0.0
        """How probable it is that the store keeps only half of a segment's object that it confirms."""
        self.has_truncated = False
        self.late_put_rate = 0.0
        """How probable it is that a write of a segment's object arrives long after its sender gave it up."""
        self.late_until_s = 0.0
        """When the last late write has arrived."""
        self.refusals: list[Callable[[str, str], bool]] = []
        """Say whether the store answers 503 to a verb (GET, PUT, DELETE, LIST) and a key, or a prefix of keys."""
        self.slow_ms = 0
        self.late_ms = 0
        """How long a new object stays invisible at most."""
        self.cuts: set[str] = set()
        """The names of the processes that do not reach the store."""
        self.unmounted: set[str] = set()
        """The names of the processes that see a folder of their own machine in place of the store."""
        self._folders: dict[str, dict[str, _Object]] = {}
        """What processes wrote into such a folder. They see it again the next time."""
        self.on_delete: Callable[[str, str], None] = lambda key, name: None
        self.on_put: Callable[[str, str, bytes], None] = lambda key, name, data: None
        self.on_copy: Callable[[str, str], None] = lambda key, name: None
        self.on_served: Callable[[str, str, str], None] = lambda verb, key, name: None
        """Called with verb, key and process after a request has taken effect, before its answer leaves."""
        self.failed_at_s = -1e9
        """When a request of a process was last refused, failed, or lost."""
        self.requests = 0
        self.counts: Counter[str] = Counter()
        """How many requests of each verb arrived, pages of listings, and bytes."""

    async def call(self, name: str, work: Callable[[], T], delay_s: float = 0.0) -> T:
        """Sends a request, which does `work` when it arrives, at least `delay_s` later."""
        loop, rng = self.loop, self.rng
        answer: asyncio.Future[Any] = loop.create_future()
        self.requests += 1

        def latency_s() -> float:
            return rng.uniform(0.001, 0.01) + rng.random() ** 3 * self.slow_ms / 1000

        def arrive() -> None:
            if name in self.cuts:
                self.failed_at_s = loop.time()
                return
            if self.is_down or (self.error_rate and rng.random() < self.error_rate):
                self.failed_at_s = loop.time()
                loop.later(latency_s(), settle, None, RetriableRemoteStorageError("503 Slow Down"))
                return
            try:
                result: Any = work()
            except Exception as error:
                loop.later(latency_s(), settle, None, error)
                return
            if self.lost_rate and rng.random() < self.lost_rate:
                self.failed_at_s = loop.time()
                if rng.random() < 0.5:
                    loop.later(latency_s(), settle, None, RetriableRemoteStorageError("the connection was reset"))
                return
            loop.later(latency_s(), settle, result, None)

        def settle(result: Any, error: Exception | None) -> None:
            if answer.done() or name in self.cuts:
                return
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)
                answer.exception()

        loop.later(delay_s + latency_s(), arrive)
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                result: T = await answer
                return result
        except TimeoutError as error:
            raise RetriableRemoteStorageError("the store did not answer in time") from error

    def put_delay_s(self) -> float:
        """How long a write is on its way. The network may keep the last packets of a process that was stopped."""
        if not self.late_put_rate or self.rng.random() >= self.late_put_rate:
            return 0.0
        delay_s = self.rng.uniform(_TIMEOUT_S, _LATEST_PUT_S)
        self.late_until_s = max(self.late_until_s, self.loop.time() + delay_s + 1)
        return delay_s

    def _check(self, verb: str, key: str) -> None:
        self.counts[verb] += 1
        if self.refusals and any(is_refused(verb, key) for is_refused in self.refusals):
            self.failed_at_s = self.loop.time()
            raise RetriableRemoteStorageError(f"503 Slow Down: {verb} {key}")

    def seen_by(self, name: str) -> dict[str, _Object]:
        """Returns the objects of the store, or of the folder that the process has in place of it."""
        return self._folders.setdefault(name, {}) if name in self.unmounted else self.objects

    def get(self, key: str, name: str, part: slice = slice(None)) -> bytes:
        self._check("GET", key)
        found = self.seen_by(name).get(key)
        if found is None or (found.visible_at_s > self.loop.time() and found.writer != name):
            raise RemoteResourceNotFoundError(f"there is no object {key}")
        data = found.data[part]
        self.counts["bytes read"] += len(data)
        self.on_served("GET", key, name)
        return data

    def put(self, key: str, data: bytes, name: str) -> None:
        self._check("PUT", key)
        self.counts["bytes written"] += len(data)
        objects = self.seen_by(name)
        if parse_segment_key(key) is not None and key in objects:
            return  # the objects of a segment are created, and never replaced
        if objects is self.objects:
            self.on_put(key, name, data)
        if self.truncate_rate and parse_segment_key(key) is not None and self.rng.random() < self.truncate_rate:
            data, self.has_truncated = data[: len(data) // 2], True
        late_s = self.rng.uniform(0, self.late_ms / 1000) if self.late_ms and key not in objects else 0
        known = objects.get(key)
        visible_at_s = self.loop.time() + late_s if known is None else known.visible_at_s
        objects[key] = _Object(data, visible_at_s, name)
        self.on_served("PUT", key, name)

    def delete(self, key: str, name: str) -> None:
        self._check("DELETE", key)
        objects = self.seen_by(name)
        if objects is not self.objects:
            objects.pop(key, None)
            return
        self.on_delete(key, name)
        objects.pop(key, None)
        self.on_served("DELETE", key, name)

    def list(self, prefix: str, name: str) -> list[tuple[str, int]]:
        """Returns the keys that begin with the prefix, and the sizes of their objects."""
        self._check("LIST", prefix)
        objects = self.seen_by(name)
        self.counts["pages listed"] += 1 + sum(key.startswith(prefix) for key in objects) // _KEYS_PER_PAGE
        return [(key, len(objects[key].data)) for key in sorted(objects) if key.startswith(prefix)]


def stored_facts(store: SimStore, prefix: str) -> list[PartitionFacts]:
    """Returns the facts in the `.facts` and `.indexes` objects of a partition that can be read."""
    found: list[PartitionFacts] = []
    for key, stored in store.objects.items():
        with suppress(RemoteLogError):
            if key.startswith(prefix) and key.endswith(".facts"):
                found.append(decoded_facts(stored.data))
            elif key.startswith(prefix) and key.endswith(".indexes"):
                found.append(decoded_facts(bytes(decode_indexes_object(stored.data).indexes.facts)))
    return found


def refuse(store: SimStore, verbs: Collection[str]) -> Callable[[], None]:
    """Lets the store answer 503 to these verbs. Returns how that ends."""

    def is_refused(verb: str, key: str) -> bool:
        return verb in verbs

    store.refusals.append(is_refused)
    return lambda: store.refusals.remove(is_refused)


class SimStorage:
    """Implements `RemoteStorageManager` for the process that makes it."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        process: Any = current_process.get()
        self._store: SimStore = process.store
        self._name: str = process.name
        self._cluster_id = settings["cluster.id"]

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    def _keys(self, metadata: RemoteLogSegmentMetadata) -> tuple[str, str]:
        return log_key(self._cluster_id, metadata), indexes_key(self._cluster_id, metadata)

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        log, indexes = self._keys(metadata)
        self._store.on_copy(log, self._name)
        raw = Path(data.log_segment).read_bytes()  # noqa: ASYNC240  # the loop is virtual
        for key, content in ((log, raw), (indexes, data.indexes)):
            put = partial(self._store.put, key, content, self._name)
            await self._store.call(self._name, put, self._store.put_delay_s())
        return None

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        check_range(start_position, end_position)
        key = self._keys(metadata)[0]
        part = slice(start_position, None if end_position is None else end_position + 1)
        return memoryview(await self._store.call(self._name, lambda: self._store.get(key, self._name, part)))

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        key = self._keys(metadata)[1]
        return await self._store.call(self._name, lambda: self._store.get(key, self._name))

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        for key in reversed(self._keys(metadata)):
            await self._delete(key)
        return True

    async def _delete(self, key: str) -> None:
        await self._store.call(self._name, lambda: self._store.delete(key, self._name))

    async def put_object(self, key: str, data: bytes) -> None:
        put = partial(self._store.put, key, data, self._name)
        await self._store.call(self._name, put, self._store.put_delay_s())

    async def get_object(self, key: str) -> bytes:
        return await self._store.call(self._name, lambda: self._store.get(key, self._name))

    async def delete_object(self, key: str) -> None:
        await self._delete(key)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        for key, size in await self._store.call(self._name, lambda: self._store.list(prefix, self._name)):
            yield StoredObject(key, size)
