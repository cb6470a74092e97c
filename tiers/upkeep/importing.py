"""Writes many records to the metadata topic, for a command or a job that imports rebuilt records or those of a file.

The records are written in transactions, as an owner's are, since readers ignore them otherwise. A running owner might
write about the same partitions at the same time, so no owner may run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from tiers.access.open_tier import TIMEOUT_MS, RemoteTierError, metadata_to_now, read_all
from tiers.access.progress import SILENCE, Progress
from tiers.broker.client import BrokerClient, wall_clock_ms
from tiers.config.tier_config import TierConfig
from tiers.metadata.records.serde import UNFINISHED_REBUILD_API_KEY, KeyAndValue, RecordKey, key_and_value, tombstone
from tiers.metadata.topic.group.group_members import group_members
from tiers.metadata.topic.metadata_producer import TransactionalProducer
from tiers.metadata.topic.metadata_topic import MetadataTopic
from tiers.metadata.topic.settings import metadata_group_id
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import UnfinishedRebuildUpdate

WRITER = "tidegate-import"
"""The writer in the log start records of an import."""
_WRITE_TIMEOUT_MS = 8_000
"""The limit of each transaction."""
RECORDS_PER_TRANSACTION = 500

RecordsOf = Callable[[TopicBasedMetadataLog], Sequence[tuple[TopicIdPartition, Sequence[KeyAndValue]]]]


async def refuse_beside_owners(client: BrokerClient, topics: Iterable[str]) -> None:
    """Raises `RemoteTierError` while any process owns partitions of one of these metadata topics."""
    for topic in topics:
        owners = len(await group_members(client, topic, TIMEOUT_MS))
        if owners:
            own = "1 process owns" if owners == 1 else f"{owners} processes own"
            raise RemoteTierError(
                f"{own} partitions of {topic}: stop every `tidegate serve` of this cluster, and wait "
                "until their sessions end"
            )


async def write_all(
    config: TierConfig,
    client: BrokerClient,
    records_of: RecordsOf,
    check: Callable[[TopicBasedMetadataLog], None],
    *,
    into_empty: bool,
    progress: Progress = SILENCE,
) -> None:
    """Writes the records of `records_of`, and then passes the metadata that results to `check`.

    Creates the metadata topic if it is missing. With `into_empty`, an existing topic must be empty, and no process
    believes a metadata partition before all its records are written. Raises `RemoteTierError`."""
    await refuse_beside_owners(client, [config.remote_log.metadata_topic])
    async with metadata_to_now(config, client, progress=progress) as log:
        if into_empty and used_offsets(log):
            raise RemoteTierError(f"topic {log.topic.name} is not empty: delete it, or name another topic")
        by_partition: dict[int, list[KeyAndValue]] = {}
        for partition, records in records_of(log):
            by_partition.setdefault(log.metadata_partition(partition), []).extend(records)
        if into_empty:
            announced, by_partition = as_a_whole(log.topic, by_partition, wall_clock_ms())
            await write_records(client, log.topic, announced)
        with progress.bar("records", sum(map(len, by_partition.values()))) as advance:
            await write_records(client, log.topic, by_partition, advance)
        await read_all(log.follower, log.topic, 0, TIMEOUT_MS)
        check(log)


def as_a_whole(
    topic: MetadataTopic, records: Mapping[int, Sequence[KeyAndValue]], now_ms: int
) -> tuple[dict[int, list[KeyAndValue]], dict[int, list[KeyAndValue]]]:
    """Returns what is written into every metadata partition first, and `records` with what ends each of them.

    A write of many records is many transactions, and may end between any two of them. A process that reads the topic
    meanwhile, or after that, believes no metadata partition that lacks records."""
    announced, whole = {}, {}
    for number in range(topic.partition_count):
        own = TopicIdPartition(topic.topic_id, number, topic.name)
        announced[number] = [key_and_value(UnfinishedRebuildUpdate(own, WRITER, now_ms))]
        whole[number] = [*records.get(number, ()), tombstone(RecordKey(UNFINISHED_REBUILD_API_KEY, own))]
    return announced, whole


def used_offsets(log: TopicBasedMetadataLog) -> int:
    """Returns the number of used offsets of the metadata topic; 0 when it was never written to."""
    return sum(log.follower.position(number) for number in range(log.topic.partition_count))


async def write_records(
    client: BrokerClient,
    topic: MetadataTopic,
    records: Mapping[int, Sequence[KeyAndValue]],
    on_written: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes `records`, which are ordered lists by metadata partition.

    Raises `RemoteLogMetadataError`; then some of the records may be written."""
    for metadata_partition, of_partition in records.items():
        transactional_id = f"{metadata_group_id(topic.name)}-import-{metadata_partition}"
        producer = TransactionalProducer(client, topic, metadata_partition, transactional_id)
        await producer.initialize(_WRITE_TIMEOUT_MS)
        for first in range(0, len(of_partition), RECORDS_PER_TRANSACTION):
            batch = of_partition[first : first + RECORDS_PER_TRANSACTION]
            await producer.commit(batch, None, _WRITE_TIMEOUT_MS)
            on_written(len(batch))
