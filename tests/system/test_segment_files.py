"""The proxy's segments equal a broker's own files, byte for byte: the log, and every index that Kafka keeps."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import Producer

from protocol.records.record_batch import iterate_batches
from tests.support.clients.kafka_tools import KafkaTools
from tests.support.fakes.kafka_indexes import offset_index_entries
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    TIMEOUT_S,
    create_topic,
    produce,
    random_values,
    topic_id_partition,
    transactional_producer,
    until_decided,
)
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource
from tiers.model.log_source import LogRead
from tiers.segment.indexes.indexes_object import SegmentIndexes, encode_leader_epoch_checkpoint
from tiers.segment.producer_state import ProducerStateEntry, decode_producer_snapshot
from tiers.segment.segment_builder import BuiltSegment, Carried, SegmentBuilder
from tiers.segment.transactions import MARKER_NOT_COPIED, decode_transaction_index

pytestmark = pytest.mark.integration
TIMEOUT_MS = 300_000


@asynccontextmanager
async def connected(kafka: KafkaCluster) -> AsyncIterator[BrokerClient]:
    client = BrokerClient([kafka.address()], client_id="test")
    await client.open()
    yield client
    await client.close()


@pytest.fixture
async def client(kafka: KafkaCluster) -> AsyncIterator[BrokerClient]:
    async with connected(kafka) as client:
        yield client


def write_everything(bootstrap: str, topic: str, tools: KafkaTools) -> None:
    """Writes records of every kind of producer."""
    # Java's producers use a new epoch for every transaction (KIP-890), librdkafka's do not.
    words = ["--num-records", "300", "--record-size", "2000", "--throughput", "600", "--transaction-duration-ms", "50"]
    properties = ("--command-property", "batch.size=5000", "--command-property", "compression.type=zstd")
    done = tools.run("kafka-producer-perf-test", bootstrap, "--topic", topic, *words, *properties)
    assert done.exit_code == 0, done.errors
    write_batches(bootstrap, topic)
    write_transactions(bootstrap, topic)


def write_batches(bootstrap: str, topic: str) -> None:
    """Writes batches with and without compression, with and without a producer id, of one record and of many."""
    chance = random.Random(2)
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        for is_idempotent in (False, True, True):
            settings = {"compression.type": codec, "enable.idempotence": is_idempotent, "linger.ms": 2}
            producer = Producer({"bootstrap.servers": bootstrap, **settings})
            for _ in range(40):
                producer.produce(topic, chance.randbytes(chance.randrange(20, 2000)), partition=0)
                if chance.random() < 0.3:
                    producer.flush(TIMEOUT_S)
            producer.flush(TIMEOUT_S)


def write_transactions(bootstrap: str, topic: str) -> None:
    """Writes overlapping transactions of two producers that span segments, are committed or aborted, and whose clocks
    disagree.

    A third producer leaves a transaction open. Its successor fences it, which ends the transaction."""
    chance = random.Random(1)
    producers = [transactional_producer(bootstrap, f"{topic}-{number}") for number in range(2)]

    def send(producer: Producer, count: int) -> None:
        for _ in range(count):
            timestamp = 1_600_000_000_000 + chance.randrange(1_000_000)
            producer.produce(topic, chance.randbytes(chance.randrange(50, 2000)), partition=0, timestamp=timestamp)
            if chance.random() < 0.3:
                producer.flush(TIMEOUT_S)
        producer.flush(TIMEOUT_S)

    fenced = transactional_producer(bootstrap, f"{topic}-fenced")
    fenced.begin_transaction()
    send(fenced, 3)
    transactional_producer(bootstrap, f"{topic}-fenced")
    first, second = producers
    for turn in range(12):
        first.begin_transaction()
        send(first, 60)
        second.begin_transaction()
        send(second, 60)
        send(first, 60)
        (first.abort_transaction if turn % 3 == 0 else first.commit_transaction)(TIMEOUT_S)
        first.begin_transaction()
        send(first, 20)
        (second.abort_transaction if turn % 2 == 0 else second.commit_transaction)(TIMEOUT_S)
        (first.abort_transaction if turn % 4 == 1 else first.commit_transaction)(TIMEOUT_S)
    until_decided(bootstrap, topic)


async def read_all(source: BrokerLogSource, client: BrokerClient, topic: str) -> list[LogRead]:
    partition = await topic_id_partition(client, topic)
    end = (await source.bounds(partition, TIMEOUT_MS)).last_stable_offset
    reads: list[LogRead] = []
    offset = 0
    while offset < end:
        read = await source.read(partition, offset, 200_000, TIMEOUT_MS)
        reads.append(read)
        *_, last = iterate_batches(read.records)
        offset = last.next_offset
    return reads


def build(folder: Path, reads: list[LogRead], base_offsets: list[int]) -> list[BuiltSegment]:
    """Builds one segment for each base offset. Each builder continues the one before."""
    built: list[BuiltSegment] = []
    builder = SegmentBuilder(folder / "0", 0)
    for read in reads:
        start = 0
        for batch in iterate_batches(read.records):
            if batch.base_offset in base_offsets[1:]:
                builder.append(read.records[start : batch.start], read.aborted_transactions)
                built.append(builder.finish())
                start = batch.start
                carried = Carried.behind(built[-1].indexes)
                builder = SegmentBuilder(folder / str(batch.base_offset), batch.base_offset, carried)
        builder.append(read.records[start:], read.aborted_transactions)
    return [*built, builder.finish()]


async def test_segments_equal_the_brokers_own(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str, tmp_path: Path, tools: KafkaTools
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name, config={"retention.ms": "-1", "segment.bytes": str(1 << 20)})
    await asyncio.to_thread(write_everything, kafka.bootstrap_servers, topic_name, tools)
    reads = await read_all(BrokerLogSource(client), client, topic_name)

    folder = kafka.log_folder(topic_name, 0)
    base_offsets = sorted(int(name.removesuffix(".log")) for name in file_names(folder) if name.endswith(".log"))
    assert len(base_offsets) >= 4
    segments = build(tmp_path, reads, base_offsets)
    assert [segment.start_offset for segment in segments] == base_offsets
    assert [one.end_offset + 1 for one in segments[:-1]] == base_offsets[1:]

    for segment in segments:
        stem = f"{segment.start_offset:020}"
        assert content(segment.log_segment) == content(folder / f"{stem}.log")
        assert segment.missing_offsets == 0
        assert segment.indexes.transaction_index == content_if_any(folder / f"{stem}.txnindex")
    for segment in segments[:-1]:  # the indexes of the active segment are preallocated
        stem = f"{segment.start_offset:020}"
        assert segment.indexes.offset_index == content(folder / f"{stem}.index")
        assert segment.indexes.time_index == content(folder / f"{stem}.timeindex")
        at_end = content(folder / f"{segment.end_offset + 1:020}.snapshot")
        assert producers_of(segment) == decode_producer_snapshot(at_end)
        assert segment.indexes.producer_snapshot == at_end
    check_kinds_of_producers(segments)
    assert encode_leader_epoch_checkpoint(segments[-1].leader_epochs) == content(folder / "leader-epoch-checkpoint")
    check_aborted([segment.indexes for segment in segments], base_offsets)
    check_dumps(tools, tmp_path / "files", segments)


def producers_of(segment: BuiltSegment) -> tuple[ProducerStateEntry, ...]:
    return Carried.behind(segment.indexes).producers


def check_kinds_of_producers(segments: list[BuiltSegment]) -> None:
    """Checks that the segments have all kinds of producers. Otherwise equal files would prove little."""
    assert max(len(producers_of(segment)) for segment in segments[:-1]) > 12, "too few for HashMap's first table"
    known = [entry for segment in segments[:-1] for entry in producers_of(segment)]
    assert any(entry.current_txn_first_offset >= 0 for entry in known)
    assert any(entry.coordinator_epoch >= 0 and entry.last_sequence == -1 for entry in known), "a fenced one"
    assert any(entry.coordinator_epoch == -1 for entry in known), "one without transactions"
    assert any(entry.epoch > 1 for entry in known), "no producer has an epoch for every transaction"


def check_dumps(tools: KafkaTools, folder: Path, segments: list[BuiltSegment]) -> None:
    """Checks all files with Kafka's tool, which compares the indexes with the log."""
    folder.mkdir()
    names: list[str] = []
    for segment in segments:
        stem = f"{segment.start_offset:020}"
        files = {
            f"{stem}.log": content(segment.log_segment),
            f"{stem}.index": bytes(segment.indexes.offset_index),
            f"{stem}.timeindex": bytes(segment.indexes.time_index),
            f"{stem}.txnindex": bytes(segment.indexes.transaction_index),
            f"{segment.end_offset + 1:020}.snapshot": bytes(segment.indexes.producer_snapshot),
        }
        for name, written in files.items():
            (folder / name).write_bytes(written)
        names += [str(folder / name) for name in files]
    for options in (("--deep-iteration", "--print-data-log"), ("--verify-index-only",), ("--index-sanity-check",)):
        done = tools.run("kafka-dump-log", None, "--files", ",".join(names), *options)
        # For a log that does not begin at offset 0, the tool reports that the first batch follows -1.
        errors = re.sub(r"Non-consecutive offsets in \S+\n(  -1 is followed by \d+\n)+", "", done.errors)
        assert (done.exit_code, errors) == (0, "")
        for trouble in ("mismatch", "invalid", "isvalid: false", "not found", "corrupt", "out of order"):
            assert trouble not in done.output.lower()
        assert done.output.count("Dumping ") == len(names)
        if options == ("--index-sanity-check",):
            assert len(re.findall("passed sanity check|[.]index is empty", done.output)) == 2 * len(segments)
        if options[0] == "--deep-iteration":
            offsets = {int(found) for found in re.findall(r"offset: (\d+) (?:is|Create|Log)", done.output)}
            assert max(offsets) == segments[-1].end_offset


def check_aborted(indexes: list[SegmentIndexes], base_offsets: list[int]) -> None:
    """Compares with Kafka's own entries of all segments: which transactions overlap, and where each ends."""
    truth = [entry for one in indexes for entry in decode_transaction_index(one.transaction_index)]
    assert any(entry.first_offset < base for entry in truth for base in base_offsets if entry.last_offset >= base)
    for (start, following), one in zip(pairwise([*base_offsets, 1 << 62]), indexes, strict=True):
        overlapping = {
            (it.producer_id, it.first_offset, it.last_offset if it.last_offset < following else MARKER_NOT_COPIED)
            for it in truth
            if it.first_offset < following and it.last_offset >= start
        }
        assert {(it.producer_id, it.first_offset, it.last_offset) for it in one.aborted_transactions} == overlapping


async def test_after_a_restart_a_broker_counts_the_index_interval_anew(
    kafka: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """So the broker's offset index depends on more than the log. From the restart on, other batches have entries.

    The entries are equally far apart. All other files depend only on the log."""
    topic, bootstrap = topic_name, kafka.bootstrap_servers
    create_topic(bootstrap, topic)
    produce(bootstrap, topic, random_values(7), records_per_batch=1)
    kafka.stop_broker(1)
    kafka.start_broker(1)
    produce(bootstrap, topic, random_values(13), records_per_batch=1)
    async with connected(kafka) as client:
        reads = await read_all(BrokerLogSource(client), client, topic)
    (segment,) = build(tmp_path, reads, [0])
    folder = kafka.log_folder(topic, 0)
    brokers = content(folder / f"{0:020}.index").rstrip(b"\x00")  # the rest of the file is preallocated
    log = content(segment.log_segment)
    assert log == content(folder / f"{0:020}.log")
    at_restart = [entry.start_offset for entry in segment.leader_epochs]
    assert at_restart == [0, 7]
    assert encode_leader_epoch_checkpoint(segment.leader_epochs) == content(folder / "leader-epoch-checkpoint")

    positions = {batch.last_offset: batch.start for batch in iterate_batches(log)}
    ours, theirs = (dict(offset_index_entries(0, one)) for one in (segment.indexes.offset_index, brokers))
    assert (list(ours), list(theirs)) == ([4, 8, 12, 16], [4, 11, 15, 19])
    for entries in (ours, theirs):
        assert all(positions[offset] == position for offset, position in entries.items())


def file_names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def content(path: Path) -> bytes:
    return path.read_bytes()


def content_if_any(path: Path) -> bytes:
    """Returns the content. Empty if there is no file, as for a transaction index without entries."""
    return path.read_bytes() if path.exists() else b""
