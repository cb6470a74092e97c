"""DeleteRecords over both tiers answers as one broker with the whole log, and no deleted record comes back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from kafka.protocol.admin import DeleteRecordsRequest

from protocol.errors import ErrorCode
from protocol.records.record_batch import verify_batches
from protocol.records.record_reader import read_records
from tests.support.rigs.differential_answers import settled
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.two_tiers_rig import TwoTiers
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of
from tests.support.servers.producing import create_topic, filled_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = pytest.mark.integration

HIGH_WATERMARK = -1
EARLIEST = -2
COUNT = 200


def delete(peer: Peer, version: int, topic: str, asked: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """Sends a deletion of pairs (partition, offset). Returns (partition, error, low watermark) in wire order.

    Retries a timeout, as every admin client does. The deletion is idempotent."""
    topic_class = DeleteRecordsRequest.DeleteRecordsTopic
    partitions = [topic_class.DeleteRecordsPartition(partition_index=index, offset=offset) for index, offset in asked]
    topics = [topic_class(name=topic, partitions=partitions)]
    answers: list[tuple[int, int, int]] = []

    def is_in_time() -> bool:
        answer = peer.ask(DeleteRecordsRequest(version=version, topics=topics, timeout_ms=20_000), version)
        answers[:] = [(one.partition_index, one.error_code, one.low_watermark) for one in answer.topics[0].partitions]
        return all(error_code != ErrorCode.REQUEST_TIMED_OUT for _, error_code, _ in answers)

    until(is_in_time)
    return answers


class Log(Peer):
    """A connection with requests for one partition. It retries errors that ask for a retry."""

    def __init__(self, address: tuple[str, int], topic: str) -> None:
        super().__init__(address)
        self._topic = topic
        self._topic_id = topic_id_of(f"{address[0]}:{address[1]}", topic)

    def delete_before(self, offset: int, version: int = 2) -> tuple[int, int]:
        """Deletes the records below `offset`. Returns the error and the low watermark."""
        ((_, error_code, low_watermark),) = delete(self, version, self._topic, [(0, offset)])
        return error_code, low_watermark

    def earliest(self) -> int:
        return self._listed(EARLIEST)

    def first_by_timestamp(self) -> int:
        return self._listed(0)

    def _listed(self, timestamp: int) -> int:
        error_code, _, offset, _ = settled(lambda: self.list_offsets(9, self._topic, [(0, timestamp)])[0][1:])
        assert error_code == 0
        return offset

    def record_at(self, offset: int) -> tuple[int, bytes | None, int]:
        """Fetches a record. Returns the error, the value and the log start offset."""

        def once() -> tuple[int, bytes | None, int]:
            response = self.fetch(17, self._topic, self._topic_id, offset, max_bytes=1)
            (one,) = response.partitions
            records = response.records(one)
            if not one.error_code and not records:  # the read took longer than the answer may wait
                return ErrorCode.REPLICA_NOT_AVAILABLE, None, one.log_start_offset
            values = [
                record.value
                for batch in verify_batches(records)
                for record in read_records(records, batch)
                if record.offset == offset
            ]
            return one.error_code, values[0] if values else None, one.log_start_offset

        return settled(once)

    def check_begins_at(self, start: int, values: Sequence[bytes]) -> None:
        """Checks the log start with every kind of request. The record before it must be gone."""
        assert self.earliest() == start
        assert self.first_by_timestamp() == (start if start < len(values) else -1)
        if start > 0:
            assert self.record_at(start - 1)[:2] == (ErrorCode.OFFSET_OUT_OF_RANGE, None)
            assert self.record_at(0)[:2] == (ErrorCode.OFFSET_OUT_OF_RANGE, None)
        if start < len(values):
            assert self.record_at(start) == (0, values[start], start)
            assert self.record_at(len(values) - 1) == (0, values[-1], start)


def check_begins_at(address: tuple[str, int], topic: str, start: int, values: Sequence[bytes]) -> None:
    with Log(address, topic) as log:
        log.check_begins_at(start, values)


async def test_every_deletion_is_answered_as_by_a_broker_with_the_whole_log(
    tiers: TwoTiers, topic_name: str, topic: str
) -> None:
    """Compares with an untiered topic: deletions inside a segment, backwards, across both tiers, and of all records."""
    values = random_values(COUNT)
    for name in (topic, topic_name):
        await asyncio.to_thread(filled_topic, tiers.kafka.bootstrap_servers, name, values)
    seam = await tiers.settled(topic)

    def compare() -> None:
        with Log(tiers.address, topic) as tiered, Log(tiers.kafka.address(), topic_name) as whole:
            tiered.check_begins_at(0, values)
            offsets = (0, 7, 45, 20, seam - 1, COUNT + 1, -2, seam, seam + 3, 60, HIGH_WATERMARK)
            for number, offset in enumerate(offsets):
                version = number % 3
                assert tiered.delete_before(offset, version) == whole.delete_before(offset, version), offset
                start = whole.earliest()
                whole.check_begins_at(start, values)
                tiered.check_begins_at(start, values)

    await asyncio.to_thread(compare)


@pytest.mark.full
async def test_deletions_of_several_partitions_in_one_request(tiers: TwoTiers, topic: str) -> None:
    """One partition is tiered, one is local, and one does not exist. Each has its own answer."""
    await tiers.filled(topic, random_values(COUNT), partitions=2)
    await asyncio.to_thread(produce, tiers.kafka.bootstrap_servers, topic, [b"v"] * 3, partition=1)

    def ask() -> list[tuple[int, int, int]]:
        with Peer(tiers.address) as peer:
            return delete(peer, 2, topic, [(0, 33), (1, 2), (2, 1)])

    unknown = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
    assert sorted(await asyncio.to_thread(ask)) == [(0, 0, 33), (1, 0, 2), (2, unknown, -1)]


@pytest.mark.full
async def test_a_deletion_outlives_the_proxy_and_is_seen_by_another_one(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    values = random_values(COUNT * 5)
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
        "remote.log.visible.after.ms": 1000,
    }
    storage = {"implementation": "local", "path": str(tmp_path / "tier")}
    (tmp_path / "tier").mkdir()

    def proxy(name: str) -> TidegateProcess:
        return tidegate_over(
            kafka,
            tmp_path / name,
            tiered=[topic_name],
            storage=storage,
            settings=settings,
            segment_bytes=100_000,
        )

    def check(address: tuple[str, int], start: int) -> None:
        check_begins_at(address, topic_name, start, values)

    def until_seen(address: tuple[str, int], start: int) -> None:
        """Another proxy may use metadata with an age of up to half of remote.log.visible.after.ms."""
        with Log(address, topic_name) as log:
            until(lambda: log.earliest() == start)

    def delete_before(address: tuple[str, int], start: int) -> tuple[int, int]:
        with Log(address, topic_name) as log:
            return log.delete_before(start)

    with proxy("one") as one, proxy("two") as two:
        await asyncio.to_thread(produce, one.bootstrap_servers, topic_name, values)
        await asyncio.to_thread(until_trimmed, kafka, topic_name, COUNT * 2)
        for deleting, other, start in ((one, two, 150), (two, one, 333)):
            assert await asyncio.to_thread(delete_before, deleting.address, start) == (0, start)
            await asyncio.to_thread(check, deleting.address, start)
            await asyncio.to_thread(until_seen, other.address, start)
            await asyncio.to_thread(check, other.address, start)
        one.stop(signal.SIGKILL)
    with proxy("one") as again:
        await asyncio.to_thread(check, again.address, 333)
    with proxy("three") as fresh:
        await asyncio.to_thread(check, fresh.address, 333)
