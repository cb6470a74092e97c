"""Filters, sorts and pages the list of topics. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, TypeVar

from proxy.admin.facts import TierBytes, TopicLine, TopicQuery

TOPICS_PER_PAGE: Final = 100
Item = TypeVar("Item")

_SORTS: Final[dict[str, Callable[[TopicLine], Any]]] = {
    "name": lambda topic: topic.topic,
    "size": lambda topic: topic.bytes.total,
    "backlog": lambda topic: topic.backlog_bytes or 0,
    "age": lambda topic: -(topic.oldest_ms if topic.oldest_ms is not None else 1 << 62),
    "alarms": lambda topic: len(topic.alarms) + topic.gaps + topic.unanswered,
}


def matching(topics: Iterable[TopicLine], query: TopicQuery) -> list[TopicLine]:
    """Returns the topics of the query, sorted. Topics that sort alike are in the order of their names."""
    wanted = query.search.strip().lower()
    found = [
        topic
        for topic in topics
        if (not wanted or wanted in topic.topic.lower()) and (not query.state or topic.state == query.state)
    ]
    found.sort(key=lambda topic: topic.topic)
    if query.sort != "name" or query.descending:
        found.sort(key=_SORTS[query.sort], reverse=query.descending)
    return found


def page_count(items: int, per_page: int) -> int:
    return max(1, -(-items // per_page))


def page_of(items: Sequence[Item], number: int, per_page: int) -> Sequence[Item]:
    """Returns page `number`, from 1 on; the nearest page if there is no such page."""
    number = min(max(1, number), page_count(len(items), per_page))
    return items[(number - 1) * per_page : number * per_page]


def summed(topics: Collection[TopicLine]) -> TierBytes:
    return TierBytes(
        sum(topic.bytes.remote_only for topic in topics),
        sum(topic.bytes.both for topic in topics),
        sum(topic.bytes.local_only for topic in topics),
    )
