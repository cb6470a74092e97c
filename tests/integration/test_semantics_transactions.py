"""Aborted transactions across both tiers: a broker could have given every answer, and no aborted record is visible.

The test first asks the broker, which has the whole log. Then the tiers share the log, and every answer must equal the
broker's. Each client must read the same records as from a twin of the topic that only the broker has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.clients import client as clients
from tests.support.clients.all_clients import CLIENTS
from tests.support.clients.client import Client
from tests.support.rigs.transaction_reference import Reference, ask_broker, check_every_start, reference_of, whole_log
from tests.support.rigs.transaction_writer import Writer
from tests.support.rigs.two_tiers_rig import PATTERN, TwoTiers, two_tiers
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import topic_id_of
from tests.support.servers.producing import create_topic

pytestmark = [pytest.mark.integration, pytest.mark.full]


def decided_history(writer: Writer) -> None:
    writer.plain(10)
    writer.transaction("a", 10, commit=False)  # inside one segment
    writer.transaction("a", 10, commit=True)
    writer.transaction("a", 80, commit=False)  # over several segments
    writer.transaction("a", 10, commit=True)
    writer.transaction("b", 10, commit=True)
    writer.begin("b")  # overlaps other transactions at both ends
    writer.send("b", 20)
    writer.begin("a")
    writer.send("a", 20)
    writer.send("b", 20)
    writer.plain(10)
    writer.abort("b")
    writer.begin("b")
    writer.send("b", 10)
    writer.abort("a")
    writer.transaction("a", 20, commit=True)
    writer.commit("b")
    writer.transaction("c", 10, commit=False)
    writer.transaction("c", 10, commit=False)
    writer.transaction("c", 10, commit=True)
    writer.transaction("a", 90, commit=False)  # across both tiers


@asynccontextmanager
async def shared_by_two_tiers(kafka: KafkaCluster, folder: Path, topic: str) -> AsyncIterator[TwoTiers]:
    async with two_tiers(kafka, folder, PATTERN) as tiers:
        await tiers.settled(topic)
        yield tiers


async def test_every_answer_hides_what_the_broker_hid(kafka: KafkaCluster, tmp_path: Path, topic: str) -> None:
    create_topic(kafka.bootstrap_servers, topic)
    await asyncio.to_thread(decided_history, Writer(kafka.bootstrap_servers, topic))
    reference = await asyncio.to_thread(ask_broker, kafka, topic)
    topic_id = topic_id_of(kafka.bootstrap_servers, topic)
    async with shared_by_two_tiers(kafka, tmp_path, topic) as tiers:
        seam = await tiers.local_log_start(topic)
        assert any(first < seam <= marker for marker, first in reference.aborting.items())
        await asyncio.to_thread(check_every_start, tiers.address, topic, topic_id, reference)
        assert tiers.storage.gets


@pytest.fixture
def twin(kafka: KafkaCluster, topic: str) -> str:
    """Creates the tiered topic, and an untiered twin that is never trimmed. Returns the twin."""
    name = topic.removeprefix("tiered-")
    for each in (topic, name):
        create_topic(kafka.bootstrap_servers, each)
    return name


def every_client_sees_its_twin(tiers: TwoTiers, topic: str, twin: str, starts: Sequence[tuple[int, int]]) -> None:
    """Checks that each client reads the same records through both tiers as from the twin directly.

    `starts` are offsets with the limit of a fetch. The check compares timestamps and headers, at both isolation levels.
    The broker's own log gives the expected counts.
    """
    address, topic_id = tiers.kafka.address(), topic_id_of(tiers.kafka.bootstrap_servers, twin)
    counts = {
        clients.READ_COMMITTED: len(ask_broker(tiers.kafka, twin).visible),
        clients.READ_UNCOMMITTED: sum(
            batch.next_offset - batch.base_offset
            for batch in read_whole(address, twin, topic_id).batches
            if not batch.is_control
        ),
    }
    assert counts[clients.READ_COMMITTED] < counts[clients.READ_UNCOMMITTED]

    def compare_by(client: Client) -> None:
        for isolation, count in counts.items():
            whole = client.read(tiers.kafka.bootstrap_servers, twin, 0, count, isolation)
            for offset, limit in starts:
                expected = [record for record in whole if record.offset >= offset]
                found = client.read(tiers.bootstrap, topic, offset, len(expected), isolation, limit)
                assert found == expected, f"{isolation} from {offset}, {limit} bytes a fetch"

    with ThreadPoolExecutor(len(CLIENTS)) as pool:
        for name, seen in {name: pool.submit(compare_by, client) for name, client in CLIENTS.items()}.items():
            try:
                seen.result()
            except BaseException as error:
                error.add_note(f"by {name}")
                raise


async def test_every_client_sees_what_it_sees_of_a_topic_that_is_not_tiered(
    kafka: KafkaCluster, tmp_path: Path, topic: str, twin: str
) -> None:
    """It reads from the start and from the middle of an aborted transaction, one batch at a time and all at once."""
    writer = Writer(kafka.bootstrap_servers, topic, twin)
    await asyncio.to_thread(decided_history, writer)
    await asyncio.to_thread(partial(writer.transaction, "a", 10, commit=True))
    reference = await asyncio.to_thread(ask_broker, kafka, twin)
    longest = max(reference.aborting.items(), key=lambda item: item[0] - item[1])
    async with shared_by_two_tiers(kafka, tmp_path, topic) as tiers:
        starts = ((0, 1), (0, 1 << 20), (sum(longest) // 2, 1))
        await asyncio.to_thread(every_client_sees_its_twin, tiers, topic, twin, starts)
        assert tiers.storage.gets


async def test_a_marker_beyond_the_copied_range(kafka: KafkaCluster, tmp_path: Path, topic: str, twin: str) -> None:
    """An open transaction holds the last stable offset below the marker of another one, and copies end there too."""
    writer = Writer(kafka.bootstrap_servers, topic, twin)

    def undecided() -> None:
        writer.plain(10)
        writer.begin("a")
        writer.send("a", 100)
        writer.begin("b")
        writer.send("b", 10)
        writer.abort("a")
        writer.transaction("a", 10, commit=True)

    await asyncio.to_thread(undecided)
    topic_id = topic_id_of(kafka.bootstrap_servers, topic)
    reference = await asyncio.to_thread(ask_broker, kafka, topic)
    assert reference.end_offset == 110
    async with two_tiers(kafka, tmp_path, PATTERN) as tiers:
        assert await tiers.settled(topic, is_decided=False) > 60
        assert tiers.rlmm.state.remote_end_offset(await tiers.partition(topic)) == 109
        await asyncio.to_thread(check_every_start, tiers.address, topic, topic_id, reference)
        await asyncio.to_thread(every_client_sees_its_twin, tiers, topic, twin, [(0, 25_000)])

        def decided() -> None:
            writer.commit("b")
            writer.transaction("a", 20, commit=True)
            writer.transaction("a", 60, commit=False)
            writer.transaction("a", 10, commit=True)

        await asyncio.to_thread(decided)
        assert await tiers.settled(topic) > 110
        whole = await asyncio.to_thread(read_whole, tiers.address, topic, topic_id)
        await asyncio.to_thread(check_every_start, tiers.address, topic, topic_id, whole)
        assert [offset for offset, _ in whole.visible[:30]] == [*range(10), *range(110, 120), *range(121, 131)]
        assert len(whole.visible) == 10 + 10 + 10 + 20 + 10
        await asyncio.to_thread(every_client_sees_its_twin, tiers, topic, twin, [(0, 1), (60, 25_000)])


def read_whole(address: tuple[str, int], topic: str, topic_id: UUID) -> Reference:
    """Reads the whole log through the proxy with read_uncommitted, and derives the transactions from the batches."""
    return reference_of(whole_log(address, topic, topic_id))
