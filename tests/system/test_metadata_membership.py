"""The ownership group on brokers whose shortest session is too long for it (`group.min.session.timeout.ms`, 6 s)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from uuid import UUID

import pytest

from tests.support.servers.kafka import KafkaCluster
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.metadata.topic import membership
from tiers.metadata.topic.membership import Assignment, GroupMembership, MembershipSettings
from tiers.metadata.topic.metadata_topic import MetadataTopic

pytestmark = pytest.mark.integration


@asynccontextmanager
async def member(kafka: KafkaCluster, group: str) -> AsyncIterator[list[Assignment]]:
    """Yields the list of assignments of a member, which grows."""
    client = BrokerClient([kafka.address()], client_id="test")
    topic = MetadataTopic("cluster", "__remote_log_metadata", UUID(int=99), 4, 86_400_000)
    assigned: list[Assignment] = []
    membership = GroupMembership(
        client,
        topic,
        MembershipSettings(group, session_timeout_ms=2_000),
        clock_ms=monotonic_ms,
        on_assigned=assigned.append,
        on_revoked=lambda: None,
    )
    running = asyncio.create_task(membership.run())
    try:
        yield assigned
    finally:
        running.cancel()
        await asyncio.wait([running])
        await client.close()


async def test_longer_sessions_are_asked_for(
    kafka: KafkaCluster, topic_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, membership.__name__):
        async with member(kafka, topic_name) as assigned:
            await until(lambda: bool(assigned))
    assert assigned[0].metadata_partitions == frozenset(range(4))
    asked = [vars(record)["session_timeout_ms"] for record in caplog.records if "group.min.session" in record.message]
    assert asked == [4_000, 8_000]


async def test_sessions_that_no_broker_takes_are_an_error_that_names_the_settings(
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
