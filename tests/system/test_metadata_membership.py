"""The ownership group on brokers whose shortest session is too long for it (`group.min.session.timeout.ms`, 6 s)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from tests.support.servers.kafka import KafkaCluster
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.metadata.topic.group import membership
from tiers.metadata.topic.group.membership import Assignment, GroupMembership
from tiers.metadata.topic.metadata_topic import MetadataTopic, MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings

pytestmark = pytest.mark.integration


class Fit:
    def __init__(self, is_fit: Callable[[], bool]) -> None:
        self._is_fit = is_fit

    @property
    def is_fit(self) -> bool:
        return self._is_fit()


@asynccontextmanager
async def member(
    kafka: KafkaCluster, group: str, is_fit: Callable[[], bool] = lambda: True, session_timeout_ms: int = 2_000
) -> AsyncIterator[list[Assignment]]:
    """Yields the list of assignments of a member, which grows."""
    client = BrokerClient([kafka.address()], client_id="test")
    topic = MetadataTopic("cluster", "__remote_log_metadata", UUID(int=99), 4)
    assigned: list[Assignment] = []
    fitness: Any = Fit(is_fit)
    settings = TopicBasedSettings(Path(), topic=MetadataTopicSettings(group), fitness=fitness)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(membership, "_SESSION_TIMEOUT_MS", session_timeout_ms)
        one = GroupMembership(
            client, topic, settings, clock_ms=monotonic_ms, on_assigned=assigned.append, on_revoked=lambda: None
        )
        running = asyncio.create_task(one.run())
        try:
            yield assigned
        finally:
            running.cancel()
            await asyncio.wait([running])
            await client.close()


async def test_a_member_that_is_not_fit_is_given_nothing_until_it_is_fit_again(
    kafka: KafkaCluster, topic_name: str
) -> None:
    """All are unfit at last, and then each keeps its share."""
    fit = {"first": True, "second": True}
    first = member(kafka, topic_name, lambda: fit["first"], 6_000)
    second = member(kafka, topic_name, lambda: fit["second"], 6_000)
    async with first as of_first, second as of_second:

        def shares() -> list[int]:
            return [len(each[-1].metadata_partitions) if each else 0 for each in (of_first, of_second)]

        await until(lambda: shares() == [2, 2])
        fit["first"] = False
        await until(lambda: shares() == [0, 4])
        fit["first"] = True
        await until(lambda: shares() == [2, 2])
        kept = [of_first[-1].metadata_partitions, of_second[-1].metadata_partitions]
        fit["first"] = fit["second"] = False
        await until(lambda: len(of_first) > 5 or (sum(shares()) == 4 and 0 not in shares()))
        assert [of_first[-1].metadata_partitions, of_second[-1].metadata_partitions] == kept


async def test_longer_sessions_are_asked_for(
    kafka: KafkaCluster, topic_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, membership.__name__):
        async with member(kafka, topic_name) as assigned:
            await until(lambda: bool(assigned))
    assert assigned[0].metadata_partitions == frozenset(range(4))
    asked = [vars(record)["session_timeout_ms"] for record in caplog.records if "group.min.session" in record.message]
    assert asked == [4_000, 8_000]


async def test_refused_session_timeouts_are_an_error_that_names_the_settings(
    kafka: KafkaCluster, topic_name: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_LONGEST_SESSION_TIMEOUT_MS", 5_000)

    def errors() -> str:
        return "".join(str(vars(record).get("error")) for record in caplog.records)

    with caplog.at_level(logging.WARNING, membership.__name__):
        async with member(kafka, topic_name) as assigned:
            await until(lambda: "no session timeout from 2000 to 4000 ms" in errors())
    assert "group.min.session.timeout.ms" in errors()
    assert assigned == []
