from __future__ import annotations

from uuid import UUID

import pytest
from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from tests.support.fakes.broker.metadata import without_brokers
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.tiers.interposed import after, refuse
from tests.support.tiers.topic_deletion_bench import Existence, put_segments, rebuilt
from tests.support.tiers.workbench import PARTITION, ProcessEnded, Workbench
from tiers.broker.client import BrokerClient
from tiers.errors import (
    BrokerError,
    MetadataLostError,
    OwnershipLostError,
    RemoteLogMetadataError,
)
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import (
    RemotePartitionDeleteState,
)
from tiers.tasks.deletion.topic_deletion import ClusterTopicExistence, TopicDeletionTask


@pytest.fixture
async def copied(bench: Workbench) -> Workbench:
    """Three segments of a topic whose deletion is proved."""
    await put_segments(bench)
    await bench.metadata.put_topic_deletion(PARTITION.topic_id, PARTITION.topic, is_confirmed=True)
    return bench


async def deleted_after_the_delay(bench: Workbench, *others: UUID) -> TopicDeletionTask:
    """The next round deletes."""
    task = TopicDeletionTask(bench.services, Existence(PARTITION.topic_id, *others))
    assert await task.run() == 0
    bench.now_ms += bench.services.settings.remote_log.topic_deletion_delay_ms
    return task


async def test_a_deleted_topic_leaves_nothing_after_the_delay(copied: Workbench) -> None:
    existence = Existence()
    task = TopicDeletionTask(copied.services, existence)
    delay_ms = copied.services.settings.remote_log.topic_deletion_delay_ms
    assert await task.run() == 0
    existence.deleted = {PARTITION.topic_id}
    assert await task.run() == 0
    copied.now_ms += delay_ms - 1
    assert await task.run() == 0
    assert len(await copied.objects()) == 6
    copied.now_ms += 1
    assert await task.run() == 1
    assert await copied.objects() == []
    assert copied.segments == []
    assert copied.steps[:2] == ["partition-marked", "partition-deletion-started"]
    assert copied.metadata.deletions[PARTITION] is RemotePartitionDeleteState.DELETE_PARTITION_FINISHED
    assert await task.run() == 0


async def test_a_deleted_topic_goes_without_a_metadata_topic_too(copied: Workbench) -> None:
    """The brokers know no topic at all. The metadata is in a database."""
    copied.metadata.topic_id = None
    assert await (await deleted_after_the_delay(copied)).run() == 1
    assert await copied.objects() == []


async def test_a_topic_that_is_seen_again_starts_the_delay_again(copied: Workbench) -> None:
    existence = Existence(PARTITION.topic_id)
    task = TopicDeletionTask(copied.services, existence)
    delay_ms = copied.services.settings.remote_log.topic_deletion_delay_ms
    await task.run()
    existence.deleted = set()
    copied.now_ms += delay_ms
    await task.run()
    existence.deleted = {PARTITION.topic_id}
    assert await task.run() == 0
    assert len(copied.finished) == 3


async def test_segments_recorded_after_the_deletion_ended_are_deleted_too(copied: Workbench) -> None:
    task = await deleted_after_the_delay(copied)
    assert await task.run() == 1
    await copied.metadata.put_log_start(PARTITION, LogStart(50, 0, LogStartReason.USER))
    assert copied.state.partitions() == [PARTITION]
    assert await task.run() == 1
    assert copied.state.partitions() == []
    assert await task.run() == 0


@pytest.fixture
async def told(copied: Workbench) -> Workbench:
    """The store has facts of the partition too."""
    await copied.check_facts()
    await copied.facts_task.store()
    copied.steps.clear()
    return copied


@pytest.mark.parametrize("known", [2, 0])
async def test_the_segments_of_a_copy_of_the_cluster_stop_the_deletion(told: Workbench, known: int) -> None:
    """Two clusters have the same ids and one place. In one of them, the topic still exists, and its owner copies.

    The other cluster may have been separated before the first copy: it knows a log start alone."""
    segments = dict(told.metadata.segments)
    for segment_id in [*segments][known:]:
        del told.metadata.segments[segment_id]
    await told.metadata.put_log_start(PARTITION, LogStart(0, 0, LogStartReason.USER))
    objects = await told.objects()
    task = await deleted_after_the_delay(told)
    for _ in range(2):
        with pytest.raises(MetadataLostError, match="which the metadata does not know"):
            await task.run()
    assert await told.objects() == objects
    told.metadata.segments = segments
    assert await task.run() == 1
    assert await told.objects() == []


async def test_while_anything_is_left_the_facts_say_that_it_is_dead(
    told: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = told.segments[1].segment_id
    refuse(monkeypatch, told.store, "delete_log_segment_data", when=lambda each: each.segment_id == stuck)
    task = await deleted_after_the_delay(told)
    for _ in range(2):
        assert await task.run() == 0
        assert len(await told.objects()) == 3
        plan = await rebuilt(told)
        assert plan is not None
        assert (plan.segments, plan.refused) == ([], [])
        assert len(plan.dropped) == 1
    monkeypatch.undo()
    told.now_ms += 3_600_000
    assert await task.run() == 1
    assert await rebuilt(told) is None


@pytest.mark.parametrize(
    "step",
    [
        "partition-marked",
        "partition-deletion-started",
        "facts-stored",
        "delete-started-written",
        "objects-deleted",
        "facts-deleted",
    ],
)
async def test_a_deletion_that_ends_anywhere_brings_no_segment_back(told: Workbench, step: str) -> None:
    task = await deleted_after_the_delay(told)
    told.end_after = step
    with pytest.raises(ProcessEnded):
        await task.run()
    plan = await rebuilt(told)
    has_begun = not step.startswith("partition-")
    assert plan is None or not has_begun or (plan.segments, plan.refused) == ([], [])
    told.end_after = ""
    assert await (await deleted_after_the_delay(told)).run() == 1
    assert await told.objects() == []
    assert told.steps[-2:] == ["facts-deleted", "partition-deletion-finished"]


@pytest.mark.parametrize(("deleted", "objects"), [(1, 4 + 1), (3, 1)])
async def test_losing_the_partition_ends_the_deletion(
    told: Workbench, monkeypatch: pytest.MonkeyPatch, deleted: int, objects: int
) -> None:
    """The facts go last."""
    task = await deleted_after_the_delay(told)

    def lose(_: object) -> None:
        told.metadata.owned = len(told.segments) > 3 - deleted

    after(monkeypatch, told.metadata, "update_remote_log_segment_metadata", lose)
    with pytest.raises(OwnershipLostError):
        await task.run()
    assert len(await told.objects()) == objects


async def test_a_partition_that_cannot_be_deleted_leaves_the_others_alone(
    copied: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = TopicIdPartition(UUID(int=0), 0, "stuck")
    await copied.metadata.put_log_start(stuck, LogStart(1, 0, LogStartReason.USER))
    await copied.metadata.put_topic_deletion(stuck.topic_id, stuck.topic, is_confirmed=True)
    task = await deleted_after_the_delay(copied, stuck.topic_id)
    write, error = "put_remote_partition_delete_metadata", RemoteLogMetadataError("no")
    refuse(monkeypatch, copied.metadata, write, error, lambda each: each.topic_id_partition == stuck)
    assert copied.state.partitions() == [stuck, PARTITION]
    with pytest.raises(RemoteLogMetadataError):
        await task.run()
    assert await copied.objects() == []


@pytest.mark.parametrize(
    ("codes", "gone"),
    [
        ((ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.UNKNOWN_TOPIC_ID), True),
        ((ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.NONE), False),
        ((ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.TOPIC_AUTHORIZATION_FAILED), False),
    ],
)
async def test_a_topic_is_gone_when_every_broker_says_so_by_its_id(codes: tuple[int, int], gone: bool) -> None:
    topic_id = UUID(int=5)
    async with ScriptedBroker(1) as first, ScriptedBroker(2) as second:
        first.brokers = second.brokers = [first, second]
        for broker, code in zip((first, second), codes, strict=True):
            answer_by_id(broker, topic_id, code)
        client = BrokerClient([("127.0.0.1", first.port)], client_id="test")
        existence = ClusterTopicExistence(client)
        found = await existence.gone([topic_id], 60_000)
        await client.close()
    assert found == ({topic_id} if gone else set())


async def test_a_cluster_that_names_no_broker_says_nothing() -> None:
    async with ScriptedBroker(1) as broker:
        broker.script(ApiKey.METADATA, without_brokers, times=10)
        client = BrokerClient(broker.addresses, client_id="test")
        with pytest.raises(BrokerError):
            await ClusterTopicExistence(client).gone([UUID(int=5)], 60_000)
        await client.close()


def answer_by_id(broker: ScriptedBroker, topic_id: UUID, code: int) -> None:
    """Lists no topic, and answers `code` when asked for `topic_id`."""
    listing = broker.answers[MetadataRequest.API_KEY]

    async def answer(request: object) -> object:
        response = await listing(request)
        if getattr(request, "topics", None):
            topic = MetadataResponse.MetadataResponseTopic
            response.topics = [topic(error_code=code, name=None, topic_id=topic_id, is_internal=False, partitions=[])]
        return response

    broker.answers[MetadataRequest.API_KEY] = answer
