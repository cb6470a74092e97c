"""The list of topics: filter, order, pages."""

from __future__ import annotations

from dataclasses import replace

from proxy.admin.facts import TierBytes, TopicLine, TopicQuery
from proxy.admin.topic_list import matching, page_count, page_of, summed

TOPICS = [
    TopicLine("Orders", "1", "tiered", bytes=TierBytes(10, 0, 0), oldest_ms=5, backlog_bytes=7),
    TopicLine("audit", "2", "paused", bytes=TierBytes(30, 5, 0), oldest_ms=1),
    TopicLine("orders-eu", "3", "tiered", bytes=TierBytes(10, 0, 9), oldest_ms=None, backlog_bytes=99, alarms=("gap",)),
]


def names(**asked: object) -> list[str]:
    return [each.topic for each in matching(TOPICS, replace(TopicQuery(), **asked))]  # type: ignore[arg-type]


def test_a_search_finds_a_part_of_the_name_in_any_case() -> None:
    assert names(search=" oRDer ") == ["Orders", "orders-eu"]
    assert names(search="nothing") == []


def test_a_state_leaves_the_others_out() -> None:
    assert names(state="paused") == ["audit"]


def test_every_order_has_a_reverse() -> None:
    assert names() == ["Orders", "audit", "orders-eu"]
    assert names(descending=True) == ["orders-eu", "audit", "Orders"]
    assert names(sort="size", descending=True) == ["audit", "orders-eu", "Orders"]
    assert names(sort="backlog", descending=True)[0] == "orders-eu"
    assert names(sort="age", descending=True) == ["audit", "Orders", "orders-eu"]
    assert names(sort="alarms", descending=True)[0] == "orders-eu"


def test_a_page_beyond_the_end_is_the_last_one() -> None:
    assert page_count(0, 10) == 1
    assert page_count(21, 10) == 3
    assert list(page_of(range(21), 9, 10)) == [20]
    assert list(page_of(range(21), 0, 10)) == list(range(10))


def test_the_sum_counts_every_tier_for_itself() -> None:
    assert summed(TOPICS) == TierBytes(50, 5, 9)
