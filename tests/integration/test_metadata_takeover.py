"""Taking over a metadata partition of which a dead proxy has left a transaction open."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.test_remote_log_metadata_manager import copied, segment, until
from tests.integration.test_topic_based_rlmm import TIMEOUT_MS, Cluster, user_partition
from tests.servers.kafka import KafkaCluster
from tiers.broker.client import monotonic_ms
from tiers.metadata import metadata_producer
from tiers.metadata.metadata_producer import TransactionalProducer, _batch
from tiers.metadata.serde import encode_key, encode_value, key_of
from tiers.metadata.tier_config_writer import tier_config_transactional_id
from tiers.model.segment_metadata import TopicTierConfigUpdate

pytestmark = pytest.mark.integration


async def test_a_change_of_tier_settings_that_never_ended_holds_back_no_owner(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(kafka, tmp_path, topic_name)
    partition = user_partition()
    # Longer than anybody here waits.
    monkeypatch.setattr(metadata_producer, "TRANSACTION_TIMEOUT_MS", 300_000)
    async with cluster.manager("reader", is_member=False) as reader, cluster.client() as client:
        number = reader.metadata_partition(partition)
        name = tier_config_transactional_id(cluster.settings("").group_id, number)
        dead = TransactionalProducer(client, reader.topic, number, name, clock_ms=monotonic_ms)
        deadline_ms = monotonic_ms() + TIMEOUT_MS
        await dead.initialize(TIMEOUT_MS)
        await dead._add_partition(deadline_ms)
        update = TopicTierConfigUpdate(partition, "dead", 0, {"local.retention.ms": "5"})
        records: list[tuple[bytes, bytes | None]] = [(encode_key(key_of(update)), encode_value(update))]
        batch = _batch(records, dead._producer_id, dead._producer_epoch, 0)
        await dead._produce(number, batch, 1, name, deadline_ms)
    async with cluster.manager("owner") as owner:
        await until(lambda: owner.owns(partition))
        await copied(owner, segment(partition, 0, 9))
        assert owner.topic_tier_config(partition.topic_id) == {}
