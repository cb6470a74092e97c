"""A store that refuses deletions: each segment has its own backoff, is published, and withdrawn when deleted."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from uuid import UUID

import pytest
from kafka.protocol.metadata import MetadataRequest

from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.interposed import refuse
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.broker.client import BrokerClient
from tiers.errors import RemoteLogMetadataError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentState
from tiers.tasks.deletion.failed_deletions import FailedDeletion, FailedDeletionsTopic
from tiers.tasks.deletion.segment_deletion import delete_attempts

HOUR_MS = 3_600_000
EXPIRED = replace(POLICY, retention_ms=1000)


class Undeletable:
    """A store that refuses to delete some segments."""

    def __init__(self, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refused: set[int] = {0, 30, 60}
        error = RetriableRemoteStorageError("AccessDenied")
        self.asked = refuse(
            monkeypatch, bench.store, "delete_log_segment_data", error, lambda each: each.start_offset in self.refused
        )


@pytest.fixture
async def store(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Undeletable:
    """Segments 0-29, 30-59 and 60-89 are remote."""
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(10)])
    await bench.copy_all()
    bench.wall_ms += HOUR_MS
    return Undeletable(bench, monkeypatch)


async def round_of(bench: Workbench) -> None:
    await delete_attempts(bench.services, PARTITION, ())
    await bench.expire(EXPIRED)


async def test_the_pause_doubles_for_each_segment_up_to_an_hour(bench: Workbench, store: Undeletable) -> None:
    store.refused = {0}
    await round_of(bench)
    asked_at_ms = [0]
    for second in range(10, 3 * 3600, 10):
        bench.now_ms += 10_000
        count = len(store.asked)
        await delete_attempts(bench.services, PARTITION, ())
        if len(store.asked) > count:
            asked_at_ms.append(second)
    pauses = [later - earlier for earlier, later in pairwise(asked_at_ms)]
    assert pauses[:7] == [30, 60, 120, 240, 480, 960, 1920]
    assert set(pauses[7:]) == {3600}


async def test_a_failed_deletion_is_published_and_withdrawn_when_it_succeeds(
    bench: Workbench, store: Undeletable
) -> None:
    store.refused = {30}
    for _ in range(4):
        await round_of(bench)
        bench.now_ms += HOUR_MS
        bench.wall_ms += HOUR_MS
    assert bench.failed_deletion_log.published == {}
    await round_of(bench)
    (stuck,) = bench.segments
    (published,) = bench.failed_deletion_log.published.values()
    assert published == FailedDeletion(
        topic="orders",
        topic_id=str(PARTITION.topic_id),
        partition=0,
        segment=str(stuck.segment_id.id),
        start_offset=30,
        end_offset=59,
        size_bytes=stuck.segment_size_bytes,
        attempts=5,
        first_failed_at_ms=bench.wall_ms - 4 * HOUR_MS,
        last_failed_at_ms=bench.wall_ms,
        error="AccessDenied",
    )
    assert FailedDeletion.decode(published.encode()) == published

    store.refused = set()
    bench.now_ms += HOUR_MS
    await round_of(bench)
    assert bench.segments == []
    assert bench.failed_deletion_log.published == {}
    assert bench.metric("remote_failed_deletions") == 0


async def test_publications_of_another_process_are_withdrawn_too(bench: Workbench, store: Undeletable) -> None:
    store.refused = set()
    first = bench.segments[0]
    await bench.services.write_state(first, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    bench.failed_deletion_log.published[str(first.segment_id.id)] = FailedDeletion(
        "orders", str(PARTITION.topic_id), 0, str(first.segment_id.id), 0, 29, 1, 7, 0, 0, "AccessDenied"
    )
    await delete_attempts(bench.services, PARTITION, ())
    assert bench.failed_deletion_log.published == {}
    assert first.segment_id not in [one.segment_id for one in bench.segments]


async def test_a_failed_withdrawal_keeps_the_segment_but_not_the_round(bench: Workbench, store: Undeletable) -> None:
    store.refused = set()
    await bench.services.write_state(bench.segments[0], RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    bench.failed_deletion_log.failure = RemoteLogMetadataError("not writable")
    assert await delete_attempts(bench.services, PARTITION, ()) == 0
    assert len(bench.segments) == 3
    bench.failed_deletion_log.failure = None
    bench.now_ms += HOUR_MS
    assert await delete_attempts(bench.services, PARTITION, ()) == 1
    assert len(bench.segments) == 2


def test_a_record_that_is_no_failed_deletion_is_an_error() -> None:
    for raw in (b"?", b"{}", b"[]", b"\xff"):
        with pytest.raises(RemoteLogMetadataError):
            FailedDeletion.decode(raw)


async def test_the_cluster_is_asked_for_a_missing_topic_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a failure there is no topic, and every expiring segment asks for it."""
    monkeypatch.setattr("tiers.broker.metadata_reads._OTHER_BROKER_MS", 30_000)  # who is given up may be heard later
    now_ms = 1_000
    async with ScriptedBroker() as broker:
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test", clock_ms=lambda: now_ms)
        topic = FailedDeletionsTopic(client, 5_000, clock_ms=lambda: now_ms)
        await client.open()
        asked = []
        for now_ms in (1_000, 1_001, 5_999, 6_000, 6_001):
            await topic.retract(UUID(int=now_ms))
            asked.append(len(broker.received(MetadataRequest)))
        await client.close()
    first, *later = asked
    assert first > 1, "what was known may be older than the topic"
    assert later[0] == later[1] == first
    assert later[2] == later[3] > first
