"""`MetadataClient`: the Metadata requests of a `BrokerClient`, and what their answers said.

* A request names the topics that are needed. Only a survey asks for all topics.
* The requests whose answers are kept go out one at a time. So an earlier answer never replaces a later one.
* Callers that wait at the same time share a request that begins after all of their calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack
from uuid import UUID

from cachetools import LRUCache
from kafka.protocol.metadata import MetadataRequest

from protocol.apis.metadata import LAST_VERSION
from protocol.errors import ProtocolError
from tiers.bounded_gather import bounded_gather
from tiers.broker.cluster_metadata import ClusterMetadata, TopicMetadata, read_cluster_metadata, without_unknown
from tiers.errors import BrokerError

DEFAULT_METADATA_MAX_AGE_MS = 30_000
_METADATA_WITH_TOPIC_IDS = 10
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
T = TypeVar("T")


class RequestOptions(TypedDict, total=False):
    """The request has the highest version that the broker and kafka-python support, within the two bounds.

    `lane` names its connection (`BrokerClient`). `before_sending` is called when the connection is usable, right before
    the request leaves. If it raises an exception, nothing is sent."""

    min_version: int
    max_version: int | None
    lane: str
    before_sending: Callable[[], None]


class Deadline:
    """The end of a call's time, which its requests share."""

    def __init__(self, clock_ms: Callable[[], int], timeout_ms: int) -> None:
        self._clock_ms = clock_ms
        self._at_ms = clock_ms() + timeout_ms

    def remaining_ms(self) -> int:
        return max(1, self._at_ms - self._clock_ms())

    def share(self, parts: int) -> Deadline:
        """Returns a deadline after an equal share of the remaining time."""
        return Deadline(self._clock_ms, max(1, self.remaining_ms() // parts))


class _Read(NamedTuple):
    """A request whose answer was kept. The number is exact where two times may be the same millisecond."""

    number: int
    asked_at_ms: int


_NEVER = _Read(0, -1)


class MetadataClient:
    """The part of `BrokerClient` that asks for metadata. Its methods raise `BrokerError`."""

    def __init__(self, request_timeout_ms: int, clock_ms: Callable[[], int]) -> None:
        self.cached_metadata: ClusterMetadata | None = None
        """The brokers that were named last, and the topics that were read, however old; None before the first read."""
        self._request_timeout_ms = request_timeout_ms
        self._clock_ms = clock_ms
        self._lock = asyncio.Lock()
        self._missing: LRUCache[UUID, TopicMetadata] = LRUCache(_MAX_TOPICS_BY_ID)
        """The topics that a later answer lacked. A broker may lag behind, and another broker names the topic again."""
        self._reads_begun = 0
        self._last_read = self._whole_read = _NEVER
        """The last request, and the last one for all topics."""
        self._topic_reads: dict[UUID, _Read] = {}
        """The last requests for topics by their ids, also for topics that were not found. The oldest is the first."""
        self._wanted_ids: dict[UUID, None] = {}

    async def request_raw(
        self, node_id: int | None, message: Any, timeout_ms: int | None = None, **options: Unpack[RequestOptions]
    ) -> tuple[memoryview, int]:
        """Returns the undecoded body of the response, and the version. If `node_id` is None, it asks any broker."""
        raise NotImplementedError

    def _forget_others(self, known: set[Address]) -> None:
        """Called with the addresses that an answer names."""

    def _deadline(self, timeout_ms: int | None) -> Deadline:
        return Deadline(self._clock_ms, timeout_ms or self._request_timeout_ms)

    @asynccontextmanager
    async def _turn(self, deadline: Deadline) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(deadline.remaining_ms() / 1000), self._lock:
                yield
        except TimeoutError as error:
            raise BrokerError("the cluster's metadata was not read in time", retriable=True) from error

    async def metadata(self, timeout_ms: int | None = None) -> ClusterMetadata:
        """Returns the metadata of all topics, read after this call.

        The answer of a large cluster is expensive for the broker: ask for `brokers`, or for the topics that are needed
        (`named`, `leader_of`), where that is enough."""
        deadline = self._deadline(timeout_ms)
        async with self._turn(deadline):
            metadata = await self._read(None, deadline)
            self._whole_read = self._last_read
            self._topic_reads.clear()
            return metadata

    async def brokers(
        self, max_age_ms: int = DEFAULT_METADATA_MAX_AGE_MS, timeout_ms: int | None = None
    ) -> ClusterMetadata:
        """Returns the brokers, read at most `max_age_ms` before this call, and the topics that are known already.

        With 0, the request to the broker begins after this call. Concurrent callers share one refresh."""
        not_before_ms = self._clock_ms() - max_age_ms
        reads_before = self._reads_begun

        def known() -> ClusterMetadata | None:
            metadata = self.cached_metadata
            if metadata is None or self._last_read.number > reads_before:
                return metadata
            return metadata if max_age_ms > 0 and metadata.fetched_at_ms >= max(not_before_ms, 0) else None

        if (metadata := known()) is not None:
            return metadata
        deadline = self._deadline(timeout_ms)
        async with self._turn(deadline):
            return known() or await self._read([], deadline)

    def _known_topic(self, topic_id: UUID, not_before_ms: int) -> TopicMetadata | None:
        """Returns the topic if it is known from a request that began at `not_before_ms` or later."""
        read = max(self._topic_reads.get(topic_id, _NEVER), self._whole_read)
        if self.cached_metadata is None or read.asked_at_ms < not_before_ms:
            return None
        return self.cached_metadata.topics_by_id.get(topic_id)

    async def _topic(self, topic_id: UUID, deadline: Deadline) -> TopicMetadata | None:
        """Returns the topic with this id, read after this call. Callers that wait at the same time share requests."""
        called_at_ms, reads_before = self._clock_ms(), self._reads_begun
        self._wanted_ids[topic_id] = None
        async with self._turn(deadline):
            if max(self._topic_reads.get(topic_id, _NEVER), self._whole_read).number <= reads_before:
                others = [each for each in self._wanted_ids if each != topic_id][: _TOPICS_PER_REQUEST - 1]
                for each in (topic_id, *others):
                    self._wanted_ids.pop(each, None)
                await self._read_by_id((topic_id, *others), deadline)
            return self._known_topic(topic_id, called_at_ms)

    async def _read_by_id(self, ids: Sequence[UUID], deadline: Deadline) -> None:
        reads = self._topic_reads
        for each in ids:
            reads.pop(each, None)
        # The topics that were not asked for for the longest time are forgotten. They may be deleted by now.
        forgotten = list(reads)[: max(0, len(reads) + len(ids) - _MAX_TOPICS_BY_ID)]
        for each in forgotten:
            del reads[each]
        await self._read(ids, deadline, forgotten)
        reads.update(dict.fromkeys(ids, self._last_read))

    async def named(
        self,
        names: Collection[str],
        ids: Collection[UUID] = (),
        timeout_ms: int | None = None,
        *,
        node_id: int | None = None,
    ) -> ClusterMetadata:
        """Returns the brokers, and those of the topics `names` and `ids` that the asked broker knows, read now.

        The broker is `node_id`, or any. Only topics that the proxy may not describe have an error."""
        deadline = self._deadline(timeout_ms)
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

    async def topic_named(
        self, topic: str, timeout_ms: int | None = None, *, with_others: bool = False
    ) -> ClusterMetadata:
        """Returns the brokers and `topic`, as a broker that knows it says now, if any broker does.

        A new topic exists before all brokers know it. Only if no broker knows the topic, there is no such topic. The
        answer has all other topics, too, if it is `with_others`."""
        deadline = self._deadline(timeout_ms)
        metadata = await (self.metadata(timeout_ms) if with_others else self.named([topic], (), timeout_ms))
        if topic in metadata.topics:
            return metadata
        asked = None if with_others else [(topic, _NO_ID)]

        async def said_by(node_id: int) -> ClusterMetadata:
            try:
                return await self._said_by(node_id, min(_OTHER_BROKER_MS, deadline.remaining_ms()), asked)
            except BrokerError:  # a broker that is down does not show whether the topic exists
                return metadata

        answers = await bounded_gather(list(metadata.brokers), said_by, _BROKERS_AT_ONCE)
        naming = (said for said in answers if topic in said.topics and said.cluster_id == metadata.cluster_id)
        return next(naming, metadata)

    async def of_any_broker(self, ask: Callable[[int, int], Awaitable[T]], timeout_ms: int | None = None) -> T:
        """Calls `ask(node_id, timeout_ms)` for one broker after the other, and returns the first result.

        The metadata names a broker for a while after it died, so a retriable error leads to the next broker. Raises the
        last `BrokerError`, or the first that is not retriable."""
        deadline = self._deadline(timeout_ms)
        nodes = sorted((await self.brokers(timeout_ms=deadline.remaining_ms())).brokers)
        for left in range(len(nodes), 0, -1):
            try:
                return await ask(nodes[-left], deadline.share(left).remaining_ms())
            except BrokerError as error:
                if not error.retriable or left == 1:
                    raise
        raise AssertionError("metadata always names a broker")

    async def _said_by(self, node_id: int | None, timeout_ms: int, asked: _Asked | None) -> ClusterMetadata:
        """`asked` has the names and the ids of topics; None: all topics. The result has the topics that are there."""
        asked_at_ms = self._clock_ms()
        topic = MetadataRequest.MetadataRequestTopic
        topics = None if asked is None else [topic(topic_id=topic_id, name=name) for name, topic_id in asked]
        message = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        has_ids = any(name is None for name, _ in asked or ())
        lowest = _METADATA_BY_TOPIC_ID if has_ids else _METADATA_WITH_TOPIC_IDS
        body, version = await self.request_raw(
            node_id, message, timeout_ms, min_version=lowest, max_version=LAST_VERSION
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
        read = _Read(self._reads_begun, self._clock_ms())
        asked = None if ids is None else [(None, each) for each in ids]
        metadata = await self._said_by(None, deadline.remaining_ms(), asked)
        known = self.cached_metadata
        self._hear(metadata)
        if known is not None:
            replaced: Iterable[TopicMetadata] = known.topics_by_id.values()
            if ids is not None:
                metadata, replaced = metadata.with_topics_of(known, [*ids, *forgotten])
            await self._remember_missing(metadata, replaced)
        self.cached_metadata, self._last_read = metadata, read
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
        topic = None if self.cached_metadata is None else self.cached_metadata.topics_by_id.get(topic_id)
        return topic or self._missing.get(topic_id)

    def _hear(self, metadata: ClusterMetadata) -> None:
        """Checks the brokers that an answer names, and keeps their addresses. Raises `BrokerError`."""
        if not metadata.brokers:
            raise BrokerError("the cluster names no broker yet", retriable=True)
        known = self.cached_metadata
        if known is not None and metadata.cluster_id != known.cluster_id:
            # The metadata of another cluster must not replace this one's: all topics would look deleted.
            raise BrokerError(
                f"cluster {metadata.cluster_id} answers instead of {known.cluster_id}: check bootstrap.servers"
            )
        self._forget_others({(broker.host, broker.port) for broker in metadata.brokers.values()})
        if known is not None and metadata.fetched_at_ms >= known.fetched_at_ms:
            self.cached_metadata = replace(
                known,
                controller_id=metadata.controller_id,
                brokers=metadata.brokers,
                fetched_at_ms=metadata.fetched_at_ms,
            )
