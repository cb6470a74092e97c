"""What does not answer becomes a remark, and the rest is still explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from uuid import UUID

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.explained import reasons, whys
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import Refusal, TopicConfig, TopicPolicy
from tiers.errors import BrokerError
from tiers.explain.answers import PartitionAnswer, Question, StateReason
from tiers.explain.explain import Explanation
from tiers.explain.gathering import Surroundings, gather, policy_from
from tiers.metadata.topic.group.group_members import OwnerMember
from tiers.tasks.history.stored_facts import StoredFacts, read_stored_facts
from tiers.tasks.hold import HoldReason

KEEPS = {"cleanup.policy": "delete", "retention.ms": "1000", "retention.bytes": "-1"}
OWNER = OwnerMember("tidegate-1", "10.0.0.7", frozenset({3}), is_fit=True)


async def stored_of(bench: Workbench) -> StoredFacts:
    return await read_stored_facts(bench.store, "cluster", PARTITION)


async def explained(
    bench: Workbench,
    stored: StoredFacts | str,
    members: Sequence[OwnerMember] | None = (OWNER,),
    policy: TopicPolicy | None = POLICY,
) -> PartitionAnswer:
    cast(Any, bench.metadata.log).metadata_partition = lambda partition: 3
    around = Surroundings(
        cast(Any, None),
        bench.log,
        cast(Any, bench.share_groups),
        cast(Any, bench.metadata.log),
        "cluster",
        10_000,
        members,
        1000,
        settings="[[topics]]=1",
        storage=bench.store,
    )
    return Explanation(await gather(around, PARTITION, policy, stored, bench.wall_ms)).partition()


async def test_a_healthy_partition_has_no_remark(copied: Workbench) -> None:
    answer = await explained(copied, await stored_of(copied))
    assert (answer.notes, answer.owner) == ((), "10.0.0.7 (tidegate-1)")
    assert (answer.remote_end, answer.high_watermark) == (89, 100)
    assert reasons(answer, Question.ON_BROKER)[0] == HoldReason.NO_LOCAL_RETENTION


async def test_a_store_that_knows_more_than_the_metadata_is_told_as_a_doubt(copied: Workbench) -> None:
    stored = await stored_of(copied)
    del copied.metadata.segments[copied.segments[2].segment_id]
    answer = await explained(copied, stored)
    why = whys(answer, Question.ON_BROKER)[0]
    assert (why.reason, why.rule) == (
        StateReason.DOUBT,
        "docs/design.md, safety rule 5 (Gaps cost only their own records)",
    )
    assert answer.notes == (why.sentence,)
    assert StateReason.DOUBT not in {each.reason for each in answer.uncopied.whys}


async def test_the_rest_is_explained_without_the_store_or_the_leader(copied: Workbench) -> None:
    answer = await explained(copied, "The store is down.")
    assert answer.notes == ("The store is down.",)
    assert reasons(answer, Question.ON_BROKER)[0] == HoldReason.NO_LOCAL_RETENTION
    stored, copied.log.failure = await stored_of(copied), BrokerError("broker 1 is down", retriable=True)
    answer = await explained(copied, stored)
    assert answer.notes == ("The leader does not answer: broker 1 is down.",)
    assert (answer.remote_end, answer.high_watermark) == (89, None)


async def test_what_the_leader_lacks_or_has_replaced_is_a_remark(copied: Workbench) -> None:
    stored, copied.log.log_start_offset = await stored_of(copied), 95
    assert "Neither tier has the offsets 90 to 94." in (await explained(copied, stored)).notes
    copied.log.log_start_offset = 0
    copied.log.elect_unclean(50)
    answer = await explained(copied, stored)
    assert answer.notes == ("The leader has other records from offset 50 on: the owner cuts the tier there.",)


async def test_an_emptied_broker_is_told_as_a_stop(copied: Workbench) -> None:
    copied.log.records, copied.log.leader_epoch = batch_of(0, 10, leader_epoch=3), 3
    answer = await explained(copied, await stored_of(copied))
    assert {each.reason for each in whys(answer, Question.NOT_EXPIRED).values()} == {StateReason.STOPPED}
    assert "was the broker emptied or restored?" in answer.notes[0]


async def test_a_cut_that_is_not_proved_holds_expiry_alone(copied: Workbench) -> None:
    await copied.metadata.put_cut(PARTITION, 0, 50, is_proved=False)
    answer = await explained(copied, await stored_of(copied))
    assert {each.reason for each in whys(answer, Question.NOT_EXPIRED).values()} == {StateReason.UNPROVED_CUT}
    assert StateReason.UNPROVED_CUT not in {each.reason for each in whys(answer, Question.ON_BROKER).values()}
    assert answer.notes[0].startswith("The tier was cut at offset 50")


async def test_a_topic_that_nothing_tiers_has_no_owner(copied: Workbench) -> None:
    answer = await explained(copied, await stored_of(copied), policy=None)
    assert (answer.owner, len(answer.notes)) == ("", 1)
    assert answer.uncopied.whys[0].reason == StateReason.NOT_TIERED


@pytest.mark.parametrize(
    ("members", "owner", "said"),
    [
        (None, None, ""),
        ([], "", "No running process owns the partition"),
        ([OwnerMember("tidegate-2", "b", frozenset({1}), is_fit=True)], "", "No running process owns the partition"),
        ([OwnerMember("tidegate-1", "a", frozenset({3}), is_fit=False)], "a (tidegate-1)", "The owner is unfit"),
        (
            [OwnerMember("tidegate-1", "a", frozenset({3}), True, "[[topics]]=2")],
            "a (tidegate-1)",
            "The owner has another [[topics]] than this file, so it may not tier the topic as below.",
        ),
    ],
)
async def test_the_owner_is_told(
    copied: Workbench, members: list[OwnerMember] | None, owner: str | None, said: str
) -> None:
    answer = await explained(copied, await stored_of(copied), members)
    assert answer.owner == owner
    assert [note.startswith(said) for note in answer.notes] == ([True] if said else [])


@pytest.mark.parametrize(
    ("rules", "config", "reason"),
    [
        ([], KEEPS, None),
        ([TopicConfig(pattern="*")], None, "the brokers do not tell its configuration"),
        ([TopicConfig(pattern="*")], {**KEEPS, "cleanup.policy": "compact"}, "cleanup.policy is 'compact'"),
    ],
)
def test_a_topic_without_a_policy_has_a_reason(
    rules: list[TopicConfig], config: dict[str, str] | None, reason: str | None
) -> None:
    found = policy_from(PARTITION, 1, rules, {}, config)
    assert (found is None) if reason is None else (isinstance(found, Refusal) and found.reason.startswith(reason))
    tiered = policy_from(PARTITION, 1, [TopicConfig(pattern="*")], {}, KEEPS)
    assert isinstance(tiered, TopicPolicy)
    assert (tiered.topic_id, tiered.retention_ms) == (UUID(int=1), 1000)
