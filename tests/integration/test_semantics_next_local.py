"""NEXT_LOCAL_TIMESTAMP, ListOffsets -3 below version 7: the offset from which the local log has to be read.

A broker answers it with UNSUPPORTED_VERSION. The proxy answers it for tiered topics (docs/semantics.md 5.1).
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from protocol.apis.list_offsets import EARLIEST_PENDING_UPLOAD_TIMESTAMP, NEXT_LOCAL_TIMESTAMP
from protocol.errors import ErrorCode
from tests.support.rigs.late_tier import Answer, listed
from tests.support.rigs.two_tiers_rig import two_tiers
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer
from tests.support.servers.producing import create_topic, produce, random_values, transactional_producer

pytestmark = pytest.mark.integration

TIMEOUT_S = 60.0
VERSIONS = range(1, 7)
HAS_LEADER_EPOCH = 4


def next_local(address: tuple[str, int], topic: str, *, replica_id: int = -1, epoch: int = -1) -> dict[int, Answer]:
    """Returns the answer for partition 0 of a topic, by version."""
    with Peer(address) as peer:
        asked = [(0, NEXT_LOCAL_TIMESTAMP)]
        return {
            version: listed(peer, version, topic, asked, replica_id=replica_id, current_leader_epoch=epoch)[0]
            for version in VERSIONS
        }


def at(offset: int) -> dict[int, Answer]:
    return dict.fromkeys(VERSIONS, (0, 0, -1, offset, -1))


def error(code: ErrorCode) -> dict[int, Answer]:
    return dict.fromkeys(VERSIONS, (0, code, -1, -1, -1))


async def test_a_broker_refuses_the_question(kafka: KafkaCluster, topic_name: str) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    for topic in (topic_name, "no-such-topic"):
        assert next_local(kafka.address(), topic) == error(ErrorCode.UNSUPPORTED_VERSION)


async def test_it_is_behind_the_last_copied_record(kafka: KafkaCluster, tmp_path: Path, topic_name: str) -> None:
    tiered, plain = f"tiered-{topic_name}", f"plain-{topic_name}"
    for topic in (tiered, plain):
        create_topic(kafka.bootstrap_servers, topic)
        await asyncio.to_thread(produce, kafka.bootstrap_servers, topic, random_values(120))
    producer = transactional_producer(kafka.bootstrap_servers, topic_name)
    async with two_tiers(kafka, tmp_path, "tiered-*") as tiers:

        async def ask(topic: str, *, replica_id: int = -1, epoch: int = -1) -> dict[int, Answer]:
            return await asyncio.to_thread(next_local, tiers.address, topic, replica_id=replica_id, epoch=epoch)

        local_log_start = await tiers.settled(tiered)
        assert 0 < local_log_start < 120
        assert await ask(tiered) == at(120)

        producer.begin_transaction()
        producer.produce(tiered, b"open", partition=0)
        assert producer.flush(TIMEOUT_S) == 0
        tiers.storage.is_down = True
        assert await ask(tiered) == at(120)
        with Peer(tiers.address) as peer:
            pending = await asyncio.to_thread(listed, peer, 11, tiered, [(0, EARLIEST_PENDING_UPLOAD_TIMESTAMP)])
        assert pending == [(0, 0, -1, 120, -1)]

        # A broker checks the leader epoch, and the proxy relays the broker's error.
        with_epoch = {version: answer[1] for version, answer in (await ask(tiered, epoch=7)).items()}
        unknown = ErrorCode.UNKNOWN_LEADER_EPOCH
        assert with_epoch == {version: unknown if version >= HAS_LEADER_EPOCH else 0 for version in VERSIONS}

        # Followers and topics without a second tier get the broker's own answer.
        for asked, replica_id in ((plain, -1), ("no-such-topic", -1), (tiered, 1)):
            assert await ask(asked, replica_id=replica_id) == error(ErrorCode.UNSUPPORTED_VERSION)
        producer.abort_transaction(TIMEOUT_S)


async def test_it_is_the_log_start_while_nothing_is_copied(
    kafka: KafkaCluster, tmp_path: Path, topic_name: str
) -> None:
    tiered = f"tiered-{topic_name}"
    async with two_tiers(kafka, tmp_path, "tiered-*") as tiers:
        tiers.storage.is_down = True
        create_topic(kafka.bootstrap_servers, tiered)
        await asyncio.to_thread(produce, kafka.bootstrap_servers, tiered, random_values(30))
        partition = await tiers.partition(tiered)
        async with asyncio.timeout(TIMEOUT_S):
            while not tiers.rlmm.state.is_known(partition):  # noqa: ASYNC110 - the owner's first round has no event
                await asyncio.sleep(0.05)
        assert await asyncio.to_thread(next_local, tiers.address, tiered) == at(0)
