"""The audit reports a commit without a proof, and waits for a proof whose marker is late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid4

import pytest

from protocol.apis.metadata import PartitionMetadata
from tests.drill.metadata_audit import OFFSETS_TOPIC, MetadataAudit
from tests.drill.violations import FENCED, Violations
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.record_batches import build_batch, control_batch, record
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.broker.fetch import fetch_raw
from tiers.errors import BrokerError
from tiers.metadata.records.serde import key_and_value
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import OffsetAndEpoch
from tiers.model.segment_metadata import LocalLogStartUpdate

SEGMENTS = "segments"
PRODUCER_ID = 7


@pytest.fixture
async def broker() -> AsyncIterator[ScriptedBroker]:
    async with ScriptedBroker() as broker:
        broker.topics = [topic(7, SEGMENTS), topic(8, OFFSETS_TOPIC)]
        broker.logs = {(one.name, 0): LocalLog([]) for one in broker.topics}
        yield broker


@pytest.fixture
async def client(broker: ScriptedBroker) -> AsyncIterator[BrokerClient]:
    client = BrokerClient([("127.0.0.1", broker.port)], client_id="test")
    yield client
    await client.close()


@pytest.fixture
def violations() -> Violations:
    return Violations()


def topic(number: int, name: str) -> TopicMetadata:
    return TopicMetadata(name, UUID(int=number), {0: PartitionMetadata(0, 1, 5)})


def written(key: bytes, value: bytes | None) -> bytes:
    records = [record(0, key=key, value=value)]
    return build_batch(0, records, producer_id=PRODUCER_ID, producer_epoch=0, transactional=True)


def commit(broker: ScriptedBroker) -> None:
    """Appends a complete metadata transaction."""
    update = LocalLogStartUpdate(TopicIdPartition(uuid4(), 0, "orders"), "w", 0, OffsetAndEpoch(10, 0))
    broker.logs[SEGMENTS, 0].batches += [written(*key_and_value(update)), end()]


def end() -> bytes:
    return control_batch(1, commit=True, producer_id=PRODUCER_ID)


async def test_it_is_not_open_before_there_is_a_topic_for_proofs(
    broker: ScriptedBroker, client: BrokerClient, violations: Violations
) -> None:
    audit = MetadataAudit(client, SEGMENTS, violations)
    offsets = broker.topics.pop()
    with pytest.raises(BrokerError, match=f"there is no {OFFSETS_TOPIC} yet"):
        await audit.open()
    broker.topics.append(offsets)
    await audit.open()


async def test_a_proof_whose_marker_comes_late_is_one(
    broker: ScriptedBroker, client: BrokerClient, violations: Violations
) -> None:
    audit = MetadataAudit(client, SEGMENTS, violations)
    await audit.open()
    commit(broker)
    proofs = broker.logs[OFFSETS_TOPIC, 0]
    proofs.batches.append(written(b"group", b"offset"))
    assert len(await audit.events()) == 1
    async with asyncio.TaskGroup() as checking:
        checked = checking.create_task(audit.check_proofs())
        await until(lambda: audit.proofs_waited_for > 0)
        assert not checked.done()
        proofs.batches.append(end())
    assert (audit.transactions, violations.total) == (1, 0)


async def test_a_commit_without_a_proof_is_noticed_at_once(
    broker: ScriptedBroker, client: BrokerClient, violations: Violations
) -> None:
    audit = MetadataAudit(client, SEGMENTS, violations)
    await audit.open()
    commit(broker)
    assert len(await audit.events()) == 1
    await audit.check_proofs()
    assert (audit.proofs_waited_for, violations.count) == (0, {FENCED: 1})


async def test_events_are_kept_while_the_broker_does_not_answer(
    broker: ScriptedBroker, client: BrokerClient, violations: Violations, monkeypatch: pytest.MonkeyPatch
) -> None:
    audit, calls = MetadataAudit(client, SEGMENTS, violations), list[int]()

    async def fetched(*arguments: Any, **options: Any) -> Any:
        calls.append(len(calls))
        if len(calls) == 2:
            raise BrokerError("no answer", retriable=True)
        answers = await fetch_raw(*arguments, **options)
        is_more = len(calls) == 1  # than the first answer has
        return [replace(each, last_stable_offset=each.last_stable_offset + is_more) for each in answers]

    await audit.open()
    commit(broker)
    monkeypatch.setattr("tests.drill.metadata_audit.fetch_raw", fetched)
    with pytest.raises(BrokerError, match="no answer"):
        await audit.events()
    assert len(await audit.events()) == 1
