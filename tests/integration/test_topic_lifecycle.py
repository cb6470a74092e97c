"""Topics with a remote head are deleted, and recreated under the same name."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from uuid import UUID

import confluent_kafka
import kafka as kafka_python
import pytest
from kafka.protocol.admin import DeleteTopicsRequest

from proxy.config import load_config
from proxy.handlers.base import FetchSettings
from tests.support.clients.librdkafka import Librdkafka
from tests.support.rigs import tier_command
from tests.support.rigs.late_tier import listed
from tests.support.rigs.strict_consumer import consumer_at, read
from tests.support.rigs.two_tiers_rig import PATTERN, TwoTiers, two_tiers
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of
from tests.support.servers.producing import create_topic, delete_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over
from tiers.access.open_tier import open_tier
from tiers.storage.object_key import parse_segment_key

pytestmark = pytest.mark.integration

TIMEOUT_S = 300.0
EARLIEST, LATEST_TIERED = -2, -5


async def filled(tiers: TwoTiers, topic: str) -> list[bytes]:
    """Creates a topic, and waits until the broker has trimmed its head. Returns the values."""
    values = random_values(200)
    await asyncio.to_thread(produce, tiers.bootstrap, topic, values)
    assert await tiers.settled(topic) > 0
    return values


def read_by_name(bootstrap: str, topic: str, count: int) -> list[bytes]:
    """Reads with kafka-python, which sends Fetch v12 with the topic's name."""
    consumer = kafka_python.KafkaConsumer(
        bootstrap_servers=bootstrap, auto_offset_reset="none", consumer_timeout_ms=int(1000 * TIMEOUT_S)
    )
    partition = kafka_python.TopicPartition(topic, 0)
    consumer.assign([partition])
    consumer.seek(partition, 0)
    try:
        return [bytes(message.value) for _, message in zip(range(count), consumer, strict=False)]
    finally:
        consumer.close()


def read_by_id(bootstrap: str, topic: str, count: int) -> list[bytes]:
    """Reads with librdkafka, which sends Fetch v16 with the topic's id."""
    with consumer_at(bootstrap, topic, 0) as consumer:
        return [value for _, value in read(consumer, count)]


async def test_a_topic_made_again_serves_nothing_of_the_old_one(
    kafka: KafkaCluster, tmp_path: Path, topic: str
) -> None:
    async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
        old = random_values(200)
        assert await tiers.filled(topic, old) > 0
        for read_old in (read_by_name, read_by_id):
            assert await asyncio.to_thread(read_old, tiers.bootstrap, topic, len(old)) == old
        old_partition = await tiers.partition(topic)
        await asyncio.to_thread(delete_topic, tiers.bootstrap, topic)
        await until_created(tiers.bootstrap, topic)
        assert tiers.rlmm.state.is_tiered(old_partition.topic_id)

        few = random_values(5)
        await asyncio.to_thread(produce, tiers.bootstrap, topic, few)
        for read_new in (read_by_name, read_by_id):
            assert await asyncio.to_thread(read_new, tiers.bootstrap, topic, len(few)) == few
        assert await asyncio.to_thread(watermarks, tiers.bootstrap, topic) == (0, len(few))
        new = few + await filled(tiers, topic)
        for read_new in (read_by_name, read_by_id):
            assert await asyncio.to_thread(read_new, tiers.bootstrap, topic, len(new)) == new


@pytest.mark.full
async def test_a_topic_made_again_is_asked_about_at_once(kafka: KafkaCluster, tmp_path: Path, topic: str) -> None:
    """The requests use the name, while the proxy still has the old topic's id in its cache."""
    settings = FetchSettings(topic_id_max_age_ms=600_000)
    async with two_tiers(kafka, tmp_path, PATTERN, settings, metadata_max_age="600s") as tiers:
        assert await tiers.filled(topic, random_values(200)) > 0
        old = await tiers.partition(topic)

        def ask(timestamp: int) -> int:
            with Peer(tiers.address) as peer:
                ((_, error_code, _, offset, _),) = listed(peer, 9, topic, [(0, timestamp)])
            assert error_code == 0
            return offset

        assert await asyncio.to_thread(delete_before, tiers.bootstrap, topic, 20) == 20
        assert await asyncio.to_thread(ask, EARLIEST) == 20
        assert await asyncio.to_thread(ask, LATEST_TIERED) == 199
        await asyncio.to_thread(delete_topic, kafka.bootstrap_servers, topic)
        await until_created(kafka.bootstrap_servers, topic)
        await asyncio.to_thread(produce, kafka.bootstrap_servers, topic, random_values(30))

        assert await asyncio.to_thread(ask, EARLIEST) == 0
        assert await asyncio.to_thread(ask, LATEST_TIERED) < 30
        assert await asyncio.to_thread(ask, 0) == 0
        assert await asyncio.to_thread(earliest_by_kafka_python, tiers.bootstrap, topic) == 0
        assert await asyncio.to_thread(delete_before, tiers.bootstrap, topic, 25) == 25
        assert await asyncio.to_thread(ask, EARLIEST) == 25
        assert tiers.rlmm.state.log_start_offset(old) == 20


def delete_before(bootstrap: str, topic: str, offset: int) -> int:
    """Deletes records with kafka-python. Returns the low watermark."""
    admin = kafka_python.KafkaAdminClient(bootstrap_servers=bootstrap)
    partition = kafka_python.TopicPartition(topic, 0)
    try:
        return int(admin.delete_records({partition: offset})[partition]["low_watermark"])
    finally:
        admin.close()


def earliest_by_kafka_python(bootstrap: str, topic: str) -> int:
    consumer = kafka_python.KafkaConsumer(bootstrap_servers=bootstrap)
    partition = kafka_python.TopicPartition(topic, 0)
    try:
        return int(consumer.beginning_offsets([partition])[partition])
    finally:
        consumer.close()


async def until_created(bootstrap: str, topic: str) -> None:
    """Creates the topic. Retries while the broker still deletes the old one."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            try:
                await asyncio.to_thread(create_topic, bootstrap, topic)
                return
            except confluent_kafka.KafkaException:
                await asyncio.sleep(0.2)


def watermarks(bootstrap: str, topic: str) -> tuple[int, int]:
    found = Librdkafka().offsets(bootstrap, topic, 0)
    return found.earliest, found.latest


def objects_of(folder: Path, topic_id: UUID) -> list[str]:
    """Returns the objects of the topic's segments in the store."""
    keys = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return sorted(key for key in keys if (parsed := parse_segment_key(key)) and parsed.topic_id == topic_id)


def delete_by_v6(address: tuple[str, int], name: str | None, topic_id: UUID) -> None:
    """Deletes a topic with DeleteTopics v6, by name or by id. A proxy's bootstrap port leads to any broker."""
    topic = DeleteTopicsRequest.DeleteTopicState(name=name, topic_id=topic_id if name is None else UUID(int=0))
    with Peer(address) as peer:
        (result,) = peer.ask(DeleteTopicsRequest(topics=[topic], timeout_ms=60_000), 6).responses
    assert (result.error_code, result.topic_id) == (0, topic_id)


@pytest.mark.full
def test_a_topic_is_deleted_by_proof_and_not_for_its_absence(kafka: KafkaCluster, tmp_path: Path, topic: str) -> None:
    """A deletion through a proxy deletes the remote data. After one at the brokers, an operator must confirm it."""
    settings: dict[str, str | int] = {
        "workers": 2,
        "remote.log.topic.deletion.delay.ms": 500,
        "remote.log.manager.task.interval.ms": 200,
        "remote.log.metadata.topic.name": f"__metadata-{topic}"[:200],
    }
    names = [f"{topic}-{number}" for number in range(6)]
    by_name, by_name_in_v6, by_id, *directly = names
    with tidegate_over(kafka, tmp_path, tiered=[f"{topic}-*"], segment_bytes=20_000, settings=settings) as proxy:

        def command(*arguments: str) -> tuple[int, str]:
            code, out, _ = asyncio.run(tier_command.run(proxy.config, "delete-missing", *arguments))
            return code, out

        def missing() -> dict[str, dict[str, object]]:
            return {each["topic"]: each for each in json.loads(command("--json")[1])}

        for name in names:
            create_topic(proxy.bootstrap_servers, name)
            produce(proxy.bootstrap_servers, name, random_values(50))
        topic_ids = {name: topic_id_of(kafka.bootstrap_servers, name) for name in names}
        store = tmp_path / "tier"
        until(lambda: all(len(objects_of(store, each)) >= 4 for each in topic_ids.values()))
        assert missing() == {}

        for name in directly:
            delete_topic(kafka.bootstrap_servers, name)
        until(lambda: [each["deletion_proved"] for each in missing().values()] == [False] * len(directly))
        left = {name: objects_of(store, topic_ids[name]) for name in directly}
        delete_topic(proxy.bootstrap_servers, by_name)
        delete_by_v6(proxy.address, by_name_in_v6, topic_ids[by_name_in_v6])
        delete_by_v6(proxy.address, None, topic_ids[by_id])
        until(lambda: not any(objects_of(store, topic_ids[name]) for name in (by_name, by_name_in_v6, by_id)))
        for name in directly:  # a copy in progress may have added objects
            assert set(left[name]) <= set(objects_of(store, topic_ids[name]))
        assert missing().keys() == set(directly)
        assert proxy.metric("tidegate_remote_log_alarms_total", reason="topics-missing") >= len(directly)

        code, out = command()
        assert (code, out.count("an operator must decide")) == (1, len(directly))
        assert command(directly[0])[0] == 0
        assert not missing()[directly[0]]["deletion_proved"]
        assert command(directly[0], str(topic_ids[directly[1]]), "--yes")[0] == 0
        assert command(by_name, "--yes")[0] == 2
        until(lambda: all(objects_of(store, topic_ids[name]) == [] for name in directly[:2]))
        assert not missing()[directly[2]]["deletion_proved"]
        assert set(left[directly[2]]) <= set(objects_of(store, topic_ids[directly[2]]))
        assert command("--older-than", "7d", "--yes")[0] == 0
        assert not missing()[directly[2]]["deletion_proved"]
        assert command("--older-than", "1ms", "--yes")[0] == 0
        until(lambda: objects_of(store, topic_ids[directly[2]]) == [])
        assert command("--json") == (0, "[]\n")
        until(lambda: records_of_missing_topics(proxy) == (set(), set()))


def records_of_missing_topics(proxy: TidegateProcess) -> tuple[set[UUID], set[UUID]]:
    """Returns the ids of the missing topics and of the deleted topics in the metadata."""

    async def read_them() -> tuple[set[UUID], set[UUID]]:
        async with open_tier(load_config(proxy.config)) as tier:
            return set(tier.state.missing_topics()), set(tier.state.topic_deletions())

    return asyncio.run(read_them())
