"""`TopicDirectory`: the ids and names of the topics that clients use, as of a known time.

The proxy asks for these topics alone: the metadata of a whole cluster may have megabytes. A topic is used when a broker
answers for it. A topic that was not used for a while is forgotten. The topics in `own_topics` are always known, because
the proxy guards them by their ids. A look-up changes nothing: clients choose the names, and a request without any right
must not push out the topics of others.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from uuid import UUID

from protocol.apis.topic_reference import TopicReference
from protocol.errors import ErrorCode
from tiers.bounded_gather import bounded_gather
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.errors import BrokerError

KEPT_FOR_MS = 600_000
MAX_TOPICS = 5_000
"""The most topics that each refresh names. The directory forgets those that were not used for the longest time."""
_LONG_AGO_MS = -1
_BROKERS_AT_ONCE = 16
_ONE_BROKER_MS = 2_000
_NAME = re.compile(r"[a-zA-Z0-9._-]{1,249}")
"""The names that a topic can have. A broker closes the connection at a name that is far longer."""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    topic_id: UUID | None
    """None: there is no such topic, or the name was not asked for yet."""
    asked_at_ms: int
    used_at_ms: int


class TopicDirectory:
    """A refresh calls `names`, asks for them, and calls `note`. All times are those of `clock_ms`."""

    def __init__(self, client: BrokerClient, clock_ms: Callable[[], int], own_topics: Collection[str] = ()) -> None:
        self._client = client
        self._clock_ms = clock_ms
        self._own_topics = tuple(own_topics)
        self._known: dict[str, _Known] = {}
        """In the order of their last use."""
        self._names: dict[UUID, str] = {}
        self._wanted: dict[str, None] = {}
        self._asking = asyncio.Lock()

    def names(self) -> list[str]:
        """Returns the topics that a refresh must name, and forgets those that were not used for a while."""
        not_before_ms = self._clock_ms() - KEPT_FOR_MS
        while self._known and next(iter(self._known.values())).used_at_ms < not_before_ms:
            self._forget_one()
        return list(dict.fromkeys((*self._own_topics, *self._known)))

    def note(self, answer: ClusterMetadata, names: Iterable[str], asked_at_ms: int) -> None:
        """Notes an answer to a request for the topics `names`, or for topics by their ids.

        The request began at `asked_at_ms` or later."""
        for name in dict.fromkeys((*names, *answer.topics)):
            known = self._known.get(name)
            if known is not None and known.asked_at_ms > asked_at_ms:
                continue
            topic = answer.topics.get(name)
            topic_id = None if topic is None or not topic.topic_id.int else topic.topic_id
            used_at_ms = asked_at_ms if known is None else known.used_at_ms
            if known is not None and known.topic_id is not None and known.topic_id != topic_id:
                self._names.pop(known.topic_id, None)
            self._known[name] = _Known(topic_id, asked_at_ms, used_at_ms)
            if topic_id is not None:
                self._names[topic_id] = name
        self._forget_surplus()

    def use_topic(self, topic: TopicReference) -> None:
        """Notes that a broker has answered for the topic. The next refresh asks for an unknown name."""
        name = self._names.get(topic) if isinstance(topic, UUID) else topic
        if name is None:
            return
        known = self._known.pop(name, None) or _Known(None, _LONG_AGO_MS, 0)
        known.used_at_ms = self._clock_ms()
        self._known[name] = known
        self._forget_surplus()

    def topic_id(self, name: str, max_age_ms: int | None = None) -> UUID | None:
        """Returns None if the name is unknown, or was asked for more than `max_age_ms` ago. Any thread may call it."""
        known = self._known.get(name)
        if known is None:
            return None
        is_young = max_age_ms is None or self._clock_ms() - known.asked_at_ms <= max_age_ms
        return known.topic_id if is_young else None

    def topic_name(self, topic_id: UUID) -> str | None:
        """Returns the name that was noted last. Any thread may call it."""
        return self._names.get(topic_id)

    async def resolve_topic_id(self, name: str, max_age_ms: int, timeout_ms: int) -> UUID | None:
        """Returns the topic's id as of at most `max_age_ms` ago. None if there is no such topic, or no answer.

        Callers that wait at the same time share a request."""
        if not _NAME.fullmatch(name):
            return None
        called_at_ms = self._clock_ms()
        self._wanted[name] = None
        try:
            async with asyncio.timeout(timeout_ms / 1000), self._asking:
                known = self._known.get(name)
                # Even young knowledge may be older than a new topic.
                age_ms = 0 if known is None or known.topic_id is None else max_age_ms
                if known is None or known.asked_at_ms <= called_at_ms - age_ms:
                    names, self._wanted = list(dict.fromkeys((name, *self._wanted))), {}
                    asked_at_ms = self._clock_ms()
                    self.note(await self._client.named(names, (), timeout_ms), names, asked_at_ms)
                self._wanted.pop(name, None)
        except (BrokerError, TimeoutError) as error:
            logger.debug("no broker tells the id of a topic", extra={"topic": name, "error": str(error)})
            return None
        return self.topic_id(name)

    async def resolve_topic_name(self, topic_id: UUID, timeout_ms: int) -> str | None:
        """Returns the topic's name. None: there is no such topic. Raises `BrokerError`."""
        if (name := self.topic_name(topic_id)) is not None:
            return name
        asked_at_ms = self._clock_ms()
        self.note(await self._client.named((), (topic_id,), timeout_ms), (), asked_at_ms)
        return self.topic_name(topic_id)

    async def current_topic_ids(
        self, names: Collection[str], node_id: int | None, timeout_ms: int
    ) -> Mapping[str, UUID]:
        """Returns the topics' ids, which it asks of the broker `node_id` (None: of any broker). Raises `BrokerError`.

        The result has no entry for a topic that the broker does not know."""
        if not names:
            return {}
        answer = await self._client.named(names, (), timeout_ms, node_id=node_id)
        return {topic.name: topic.topic_id for topic in answer.topics.values() if topic.error == ErrorCode.NONE}

    async def all_topic_ids(self, names: Collection[str], timeout_ms: int) -> Mapping[str, Collection[UUID]]:
        """Returns the ids that the topics have at any broker that can be reached. Raises `BrokerError` without one."""
        nodes = list((await self._client.brokers(timeout_ms=timeout_ms)).brokers)
        one_ms = min(_ONE_BROKER_MS, timeout_ms)

        async def said_by(node_id: int) -> Mapping[str, UUID] | BrokerError:
            try:
                return await self.current_topic_ids(names, node_id, one_ms)
            except BrokerError as error:
                return error

        answers = await bounded_gather(nodes, said_by, _BROKERS_AT_ONCE)
        found = [answer for answer in answers if not isinstance(answer, BrokerError)]
        if not found:
            raise BrokerError(f"no broker tells the ids of topics: {answers[0]}", retriable=True)
        return {name: {answer[name] for answer in found if name in answer} for name in names}

    def _forget_surplus(self) -> None:
        while len(self._known) > MAX_TOPICS:
            self._forget_one()

    def _forget_one(self) -> None:
        """Forgets the topic that was not used for the longest time."""
        name, known = next(iter(self._known.items()))
        if name in self._own_topics:
            self.use_topic(name)
            return
        del self._known[name]
        if known.topic_id is not None:
            self._names.pop(known.topic_id, None)
