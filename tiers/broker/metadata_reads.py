"""`MetadataReads`: the Metadata requests of a `BrokerClient`, and what their answers said.

* A request names the topics that are needed. Only a survey asks for all topics.
* The requests whose answers are kept go out one at a time. So an earlier answer never replaces a later one.
* Callers that wait at the same time share a request that begins after all of their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol
from uuid import UUID

from cachetools import LRUCache
from kafka.protocol.metadata import MetadataRequest

from protocol.apis.metadata import LAST_VERSION
from protocol.errors import ProtocolError
from tiers.bounded_gather import bounded_gather
from tiers.broker.cluster_metadata import ClusterMetadata, TopicMetadata, read_cluster_metadata, without_unknown
from tiers.errors import BrokerError

METADATA_WITH_TOPIC_IDS = 10
_METADATA_BY_TOPIC_ID = 12
_TOPICS_PER_REQUEST = 500
_TOPICS_PER_SLICE = 2_000
"""Looking for so many topics takes less than a millisecond."""
_MAX_TOPICS_BY_ID = 10_000
_BROKERS_AT_ONCE = 16
_OTHER_BROKER_MS = 2_000
_NO_ID = UUID(int=0)

Address = tuple[str, int]
_Asked = Sequence[tuple[str | None, UUID]]
"""The names and ids of topics. A topic has one of the two."""


class RequestRaw(Protocol):
    """`BrokerClient.request_raw`."""

    def __call__(
        self, node_id: int | None, message: Any, timeout_ms: int | None = None, *, min_version: int, max_version: int
    ) -> Awaitable[tuple[memoryview, int]]: ...


class Deadline:
    """The end of a call's time, which its requests share."""

    def __init__(self, clock_ms: Callable[[], int], timeout_ms: int) -> None:
        self._clock_ms = clock_ms
        self._at_ms = clock_ms() + timeout_ms

    def remaining_ms(self) -> int:
        return max(1, self._at_ms - self._clock_ms())

    def at_most(self, timeout_ms: int) -> int:
        return min(timeout_ms, self.remaining_ms())

    def share(self, parts: int) -> Deadline:
        """Returns a deadline after an equal share of the remaining time."""
        return Deadline(self._clock_ms, max(1, self.remaining_ms() // parts))


class MetadataReads:
    """`on_brokers` is called with the addresses that an answer names."""

    def __init__(
        self, request_raw: RequestRaw, clock_ms: Callable[[], int], on_brokers: Callable[[set[Address]], None]
    ) -> None:
        self.known: ClusterMetadata | None = None
        """The brokers that were named last, and the topics that were read."""
        self._request_raw = request_raw
        self._clock_ms = clock_ms
        self._on_brokers = on_brokers
        self._lock = asyncio.Lock()
        self._missing: LRUCache[UUID, TopicMetadata] = LRUCache(_MAX_TOPICS_BY_ID)
        """The topics that a later answer lacked. A broker may lag behind, and another broker names the topic again."""
        self._whole_at_ms = -1
        """The time of the last request for all topics; -1 before the first."""
        self._topic_asked_at_ms: dict[UUID, int] = {}
        """The times of the last requests for topics by their ids."""
        self._topic_read: LRUCache[UUID, int] = LRUCache(_MAX_TOPICS_BY_ID)
        """The numbers of the last requests for topics by their ids, also for topics that were not found.

        A number is exact where two times may be the same millisecond."""
        self._reads_begun = 0
        self._read_known = 0
        self._whole_known = 0
        self._wanted_ids: dict[UUID, None] = {}

    async def at_most_as_old(self, max_age_ms: int, timeout_ms: int, *, is_whole: bool) -> ClusterMetadata:
        not_before_ms = self._clock_ms() - max_age_ms
        reads_before = self._reads_begun

        def known() -> ClusterMetadata | None:
            metadata, read = self.known, self._whole_known if is_whole else self._read_known
            if metadata is None or read > reads_before:
                return metadata
            read_at_ms = self._whole_at_ms if is_whole else metadata.fetched_at_ms
            return metadata if max_age_ms > 0 and read_at_ms >= max(not_before_ms, 0) else None

        if (metadata := known()) is not None:
            return metadata
        deadline = Deadline(self._clock_ms, timeout_ms)
        try:
            async with asyncio.timeout(deadline.remaining_ms() / 1000), self._lock:
                if (metadata := known()) is not None:
                    return metadata
                asked_at_ms = self._clock_ms()
                metadata = await self._read(None if is_whole else [], deadline)
                if is_whole:
                    self._whole_known, self._whole_at_ms = self._read_known, asked_at_ms
                    self._topic_asked_at_ms.clear()
                    self._topic_read.clear()
                return metadata
        except TimeoutError as error:
            raise BrokerError("the cluster's metadata was not read in time", retriable=True) from error

    def known_topic(self, topic_id: UUID, not_before_ms: int) -> TopicMetadata | None:
        """Returns the topic if it is known from a request that began at `not_before_ms` or later."""
        topic = None if self.known is None else self.known.topics_by_id.get(topic_id)
        asked_at_ms = max(self._topic_asked_at_ms.get(topic_id, -1), self._whole_at_ms)
        return topic if asked_at_ms >= not_before_ms else None

    async def topic(self, topic_id: UUID, timeout_ms: int) -> TopicMetadata | None:
        """Returns the topic with this id, read after this call. Callers that wait at the same time share requests."""
        called_at_ms, reads_before = self._clock_ms(), self._reads_begun
        deadline = Deadline(self._clock_ms, timeout_ms)
        self._wanted_ids[topic_id] = None
        try:
            async with asyncio.timeout(deadline.remaining_ms() / 1000), self._lock:
                if max(self._topic_read.get(topic_id, 0), self._whole_known) <= reads_before:
                    others = [each for each in self._wanted_ids if each != topic_id][: _TOPICS_PER_REQUEST - 1]
                    for each in (topic_id, *others):
                        self._wanted_ids.pop(each, None)
                    await self._read_by_id((topic_id, *others), deadline)
                return self.known_topic(topic_id, called_at_ms)
        except TimeoutError as error:
            raise BrokerError("the cluster's metadata was not read in time", retriable=True) from error

    async def _read_by_id(self, ids: Sequence[UUID], deadline: Deadline) -> None:
        asked_at_ms, times = self._clock_ms(), self._topic_asked_at_ms
        for each in ids:
            times.pop(each, None)
            self._topic_read.pop(each, None)
        # The topics that were not asked for for the longest time are forgotten. They may be deleted by now.
        forgotten = list(times)[: max(0, len(times) + len(ids) - _MAX_TOPICS_BY_ID)]
        for each in forgotten:
            del times[each]
            self._topic_read.pop(each, None)
        metadata = await self._read(ids, deadline, forgotten)
        found = [each for each in ids if each in metadata.topics_by_id]
        times.update(dict.fromkeys(found, asked_at_ms))
        self._topic_read.update(dict.fromkeys(ids, self._read_known))

    async def named(
        self,
        names: Collection[str],
        ids: Collection[UUID],
        timeout_ms: int,
        node_id: int | None,
    ) -> ClusterMetadata:
        deadline = Deadline(self._clock_ms, timeout_ms)
        # A broker that is asked for ids ignores the names in the same request.
        by_name = [(name, _NO_ID) for name in dict.fromkeys(names)]
        by_id = [(None, each) for each in dict.fromkeys(ids)]
        batches: list[_Asked] = [
            asked[first : first + _TOPICS_PER_REQUEST]
            for asked in (by_name, by_id)
            for first in range(0, len(asked), _TOPICS_PER_REQUEST)
        ]
        answers = [await self._said_by(node_id, deadline.remaining_ms(), batch) for batch in batches or [()]]
        self._hear(answers[-1])
        topics = {name: topic for answer in answers for name, topic in answer.topics.items()}
        topics_by_id = {each: topic for answer in answers for each, topic in answer.topics_by_id.items()}
        return replace(answers[-1], topics=topics, topics_by_id=topics_by_id)

    async def naming(self, topic: str, timeout_ms: int, *, is_whole: bool) -> ClusterMetadata:
        """Returns what a broker that knows `topic` says after this call, if any broker does.

        With `is_whole`, the result has all other topics too."""
        deadline = Deadline(self._clock_ms, timeout_ms)
        if is_whole:
            metadata = await self.at_most_as_old(0, deadline.remaining_ms(), is_whole=True)
        else:
            metadata = await self.named([topic], (), deadline.remaining_ms(), None)
        if topic in metadata.topics:
            return metadata
        asked = None if is_whole else [(topic, _NO_ID)]

        async def said_by(node_id: int) -> ClusterMetadata:
            try:
                return await self._said_by(node_id, deadline.at_most(_OTHER_BROKER_MS), asked)
            except BrokerError:  # a broker that is down does not show whether the topic exists
                return metadata

        answers = await bounded_gather(list(metadata.brokers), said_by, _BROKERS_AT_ONCE)
        naming = (said for said in answers if topic in said.topics and said.cluster_id == metadata.cluster_id)
        return next(naming, metadata)

    async def _said_by(self, node_id: int | None, timeout_ms: int, asked: _Asked | None) -> ClusterMetadata:
        """`asked` has the names and the ids of topics; None: all topics. The result has the topics that are there."""
        asked_at_ms = self._clock_ms()
        topic = MetadataRequest.MetadataRequestTopic
        topics = None if asked is None else [topic(topic_id=topic_id, name=name) for name, topic_id in asked]
        message = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        has_ids = any(name is None for name, _ in asked or ())
        body, version = await self._request_raw(
            node_id,
            message,
            timeout_ms,
            min_version=_METADATA_BY_TOPIC_ID if has_ids else METADATA_WITH_TOPIC_IDS,
            max_version=LAST_VERSION,
        )
        try:
            metadata = await read_cluster_metadata(body, version, asked_at_ms, self._last_known)
        except ProtocolError as error:
            raise BrokerError(f"a response to Metadata v{version} cannot be read: {error}") from error
        return metadata if asked is None else without_unknown(metadata)

    async def _read(
        self, ids: Sequence[UUID] | None, deadline: Deadline, forgotten: Sequence[UUID] = ()
    ) -> ClusterMetadata:
        """Reads the brokers and the topics `ids`, and keeps them. None: all topics. The caller holds the lock."""
        self._reads_begun += 1
        asked = None if ids is None else [(None, each) for each in ids]
        metadata = await self._said_by(None, deadline.remaining_ms(), asked)
        known = self.known
        self._hear(metadata)
        if known is not None:
            replaced: Iterable[TopicMetadata] = known.topics_by_id.values()
            if ids is not None:
                metadata, replaced = metadata.with_topics_of(known, [*ids, *forgotten])
            await self._remember_missing(metadata, replaced)
        self.known = metadata
        self._read_known = self._reads_begun
        return metadata

    async def _remember_missing(self, metadata: ClusterMetadata, replaced: Iterable[TopicMetadata]) -> None:
        """Remembers the replaced topics that the new metadata lacks."""
        for number, topic in enumerate(replaced, 1):
            if topic.topic_id != _NO_ID and topic.topic_id not in metadata.topics_by_id:
                self._missing[topic.topic_id] = topic
            if not number % _TOPICS_PER_SLICE:
                await asyncio.sleep(0)

    def _last_known(self, topic_id: UUID) -> TopicMetadata | None:
        """Returns what the last answer that had the topic said about it."""
        topic = None if self.known is None else self.known.topics_by_id.get(topic_id)
        return topic or self._missing.get(topic_id)

    def _hear(self, metadata: ClusterMetadata) -> None:
        """Checks the brokers that an answer names, and keeps their addresses. Raises `BrokerError`."""
        if not metadata.brokers:
            raise BrokerError("the cluster names no broker yet", retriable=True)
        known = self.known
        if known is not None and metadata.cluster_id != known.cluster_id:
            # The metadata of another cluster must not replace this one's: all topics would look deleted.
            raise BrokerError(
                f"cluster {metadata.cluster_id} answers instead of {known.cluster_id}: check bootstrap.servers"
            )
        self._on_brokers({(broker.host, broker.port) for broker in metadata.brokers.values()})
        if known is not None and metadata.fetched_at_ms >= known.fetched_at_ms:
            self.known = replace(
                known,
                controller_id=metadata.controller_id,
                brokers=metadata.brokers,
                fetched_at_ms=metadata.fetched_at_ms,
            )
