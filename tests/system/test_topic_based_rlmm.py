"""`TopicBasedManager` on a real broker: its durable state, and the ownership of writes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from kafka.admin import KafkaAdminClient, OffsetSpec
from prometheus_client import CollectorRegistry

from tests.support.rigs.metadata_managers import (
    PARTITIONS,
    TIMEOUT_MS,
    Cluster,
    TopicBasedManager,
    bear_standstills,
    user_partition,
)
from tests.support.rigs.topic_config_client import described
from tests.support.servers.kafka import KafkaCluster
from tests.support.tiers.segment_metadata import copied, segment, to
from tests.support.tiers.waiting import until
from tiers.broker.client import monotonic_ms
from tiers.errors import OwnershipLostError, RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import encode_key, encode_value, key_of
from tiers.metadata.topic.metadata_producer import GroupMember, TransactionalProducer, _batch
from tiers.metadata.topic.metadata_topic import delete_retention_ms
from tiers.metadata.topic.metrics import RemoteLogMetadataMetrics
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_metadata import RemoteLogSegmentState as State

pytestmark = pytest.mark.integration


@pytest.fixture
def cluster(kafka: KafkaCluster, tmp_path: Path, topic_name: str, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    bear_standstills(monkeypatch)
    return Cluster(kafka, tmp_path, topic_name)


async def read_to_end(manager: TopicBasedManager) -> None:
    for number in range(PARTITIONS):
        await manager.log.follower.ensure_fresh(number, 0, TIMEOUT_MS)


async def fill(cluster: Cluster, name: str, partition: TopicIdPartition, segments: int) -> None:
    async with cluster.manager(name) as manager:
        await until(lambda: manager.log.owns(partition))
        for number in range(segments):
            await copied(manager, segment(partition, number * 10, number * 10 + 9))
        await read_to_end(manager)


async def test_the_group_has_no_lag_behind_its_own_writes(cluster: Cluster) -> None:
    await fill(cluster, "one", user_partition(), 3)
    admin = KafkaAdminClient(bootstrap_servers=cluster.kafka.bootstrap_servers)
    group_id = cluster.settings("one").group_id
    committed = admin.list_group_offsets({group_id: None})[group_id]
    ends = admin.list_partition_offsets(dict.fromkeys(committed, OffsetSpec.LATEST))
    assert {at: each.offset for at, each in committed.items()} == {at: each.offset for at, each in ends.items()}
    assert committed
    admin.close()


async def test_members_share_and_the_second_takes_over(cluster: Cluster) -> None:
    async with cluster.manager("two") as second:
        async with cluster.manager("one") as first:
            await until(
                lambda: len(first.log.status().owned_partitions) == len(second.log.status().owned_partitions) == 2
            )
            assert not first.log.status().owned_partitions & second.log.status().owned_partitions
            partition = user_partition()
            mine = first.log.status().owned_partitions
            while first.log.metadata_partition(partition) not in mine:
                partition = user_partition()
            written = await copied(first, segment(partition, 0, 9))
            with pytest.raises(OwnershipLostError):
                await second.update_remote_log_segment_metadata(to(written, State.DELETE_SEGMENT_STARTED))
        await until(lambda: len(second.log.status().owned_partitions) == PARTITIONS)
        assert second.state.remote_end_offset(partition) == 9
        await second.update_remote_log_segment_metadata(to(written, State.DELETE_SEGMENT_STARTED))
        assert second.state.remote_end_offset(partition) is None


def records_of(metadata: RemoteLogSegmentMetadata) -> list[tuple[bytes, bytes | None]]:
    return [(encode_key(key_of(metadata)), encode_value(metadata))]


async def test_a_zombie_producer_is_never_visible(cluster: Cluster) -> None:
    partition = user_partition()
    async with cluster.manager("one") as owner, cluster.client() as client:
        await until(lambda: owner.log.owns(partition))
        number = owner.log.metadata_partition(partition)
        name = f"{cluster.settings('').group_id}-{number}"
        zombie = TransactionalProducer(client, owner.log.topic, number, name)
        await zombie.initialize(TIMEOUT_MS)
        nobody = GroupMember(cluster.settings("").group_id, 1, "nobody")
        lost = segment(partition, 0, 9)
        # A process outside of the current generation cannot commit, even with the newest producer epoch.
        with pytest.raises(OwnershipLostError):
            await zombie.commit(records_of(lost), nobody, TIMEOUT_MS)
        with pytest.raises(RemoteLogMetadataError, match="initialized"):
            await zombie.commit(records_of(lost), nobody, TIMEOUT_MS)

        # It fenced the owner, which notices that, gets a new assignment and continues.
        mine = segment(partition, 0, 9)
        with pytest.raises(OwnershipLostError):
            await owner.add_remote_log_segment_metadata(mine)
        await until(lambda: owner.log.owns(partition))
        await copied(owner, mine)
        assert [each.segment_id for each in owner.state.list_remote_log_segments(partition)] == [mine.segment_id]

    async with cluster.manager("fresh", is_member=False) as fresh:
        await fresh.log.ensure_fresh(partition, 0, TIMEOUT_MS)
        assert [each.segment_id for each in fresh.state.list_remote_log_segments(partition)] == [mine.segment_id]


async def test_an_old_producer_epoch_is_refused(cluster: Cluster) -> None:
    async with cluster.manager("one") as owner, cluster.client() as client:
        partition = user_partition()
        await until(lambda: owner.log.owns(partition))
        producers = [TransactionalProducer(client, owner.log.topic, 0, "an-id-of-this-test") for _ in range(2)]
        for producer in producers:
            await producer.initialize(TIMEOUT_MS)
        with pytest.raises(OwnershipLostError):
            await producers[0].commit(records_of(segment(partition, 0, 9)), GroupMember("any", -1, ""), TIMEOUT_MS)


async def test_freshness_is_the_high_watermark_not_the_last_stable_offset(cluster: Cluster) -> None:
    partition = user_partition()
    async with cluster.manager("one", is_member=False) as manager, cluster.client() as client:
        await manager.log.ensure_fresh(partition, 0, TIMEOUT_MS)
        number = manager.log.metadata_partition(partition)
        hanging = TransactionalProducer(client, manager.log.topic, number, cluster.topic.name)
        await hanging.initialize(TIMEOUT_MS)
        await hanging._add_partition(monotonic_ms() + TIMEOUT_MS)
        batch = _batch(records_of(segment(partition, 0, 9)), hanging._producer_id, hanging._producer_epoch, 0)
        await hanging._produce(number, batch, 1, cluster.topic.name, monotonic_ms() + TIMEOUT_MS)
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await manager.log.ensure_fresh(partition, 0, 1_500)
        await hanging.initialize(TIMEOUT_MS)
        await manager.log.ensure_fresh(partition, 0, TIMEOUT_MS)
        assert list(manager.state.list_remote_log_segments(partition)) == []
        assert manager.log.follower.events_read == 0


async def test_a_transaction_whose_end_is_not_known_is_recovered(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = user_partition()
    async with cluster.manager("one") as owner:
        await until(lambda: owner.log.owns(partition))
        first = segment(partition, 0, 9)

        async def never_ends(self: TransactionalProducer, committed: bool, deadline_ms: int) -> None:
            raise RemoteLogMetadataError("EndTxn did not succeed in time")

        with monkeypatch.context() as patch:
            patch.setattr(TransactionalProducer, "_end", never_ends)
            with pytest.raises(RemoteLogMetadataError, match="EndTxn"):
                await owner.add_remote_log_segment_metadata(first)
        assert not owner.log.owns(partition)
        await until(lambda: owner.log.owns(partition))
        assert list(owner.state.list_remote_log_segments(partition)) == []
        await copied(owner, first)
        assert owner.state.remote_end_offset(partition) == 9


async def test_the_brokers_clock_is_measured_by_a_write_and_is_a_metric(cluster: Cluster) -> None:
    partition = user_partition()
    async with cluster.manager("one") as owner:
        registry = CollectorRegistry()
        registry.register(RemoteLogMetadataMetrics(owner.log.status))

        def scraped(name: str) -> float | None:
            return registry.get_sample_value(f"tidegate_remote_log_metadata_{name}")

        await until(lambda: len(owner.log.status().owned_partitions) == PARTITIONS)
        assert scraped("clock_skew_seconds") is None
        assert abs(await owner.clock_skew_ms(partition)) < 1_000
        now = owner.log._clock_skew.now()
        owner.log._clock_skew.observe(now, now.wall_ms + 3_600_000)
        assert await owner.clock_skew_ms(partition) > 3_000_000
        assert abs(await owner.clock_skew_ms(partition, anew=True)) < 1_000
        assert list(owner.state.partitions()) == []
        await copied(owner, segment(partition, 0, 9))
        assert scraped("alarm") == 0
        for number in map(str, range(PARTITIONS)):
            assert registry.get_sample_value("tidegate_remote_log_metadata_owned", {"metadata_partition": number}) == 1
        assert scraped("foreign_records_total") == 0
        assert abs(scraped("clock_skew_seconds") or 0) < 1
        assert 0 <= (scraped("freshness_age_seconds") or 0) < 60
    assert registry.get_sample_value("tidegate_remote_log_metadata_owned", {"metadata_partition": "0"}) is None


async def test_the_topic_is_made_as_it_must_be(kafka_of_three: KafkaCluster, tmp_path: Path, topic_name: str) -> None:
    cluster, bootstrap = Cluster(kafka_of_three, tmp_path, topic_name), kafka_of_three.bootstrap_servers
    async with cluster.manager("one", is_member=False) as manager:
        assert manager.log.topic.partition_count == PARTITIONS
        assert await delete_retention_ms(manager.log._client, topic_name, TIMEOUT_MS) == 86_400_000
        (made,) = AdminClient({"bootstrap.servers": bootstrap}).list_topics(topic_name, 300).topics.values()
        assert [len(each.replicas) for each in made.partitions.values()] == [3] * PARTITIONS
        configs = await asyncio.to_thread(described, bootstrap, topic_name)
        wanted = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime", "min.insync.replicas": "2"}
        assert {key: configs[key].value for key in wanted} == wanted
