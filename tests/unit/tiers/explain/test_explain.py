"""An explanation names the rule by which the tasks decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.explained import answer_for, facts_for, reasons, whys
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import Refusal, TierWork, TopicPolicy
from tiers.config.total_retention import TotalRetention
from tiers.explain.answers import Place, Question, StateReason
from tiers.explain.explain import Explanation
from tiers.model.log_start import LogGap
from tiers.tasks.copy.uncopied import MIN_BATCH_BYTES
from tiers.tasks.hold import Hold, HoldReason
from tiers.texts import size_text

KEEP_NOTHING = replace(POLICY, local_retention_bytes=0)
MINUTE = replace(POLICY, retention_ms=60_000)
ON_BROKER, NOT_REMOTE, NOT_EXPIRED = Question.ON_BROKER, Question.NOT_REMOTE, Question.NOT_EXPIRED


def paused(policy: TopicPolicy, work: TierWork) -> TopicPolicy:
    return replace(policy, paused=frozenset({work}))


async def test_the_explanation_of_a_trim_is_what_the_task_does(copied: Workbench) -> None:
    segment_bytes = copied.segments[0].segment_size_bytes
    policies = [
        KEEP_NOTHING,
        POLICY,
        replace(POLICY, local_retention_ms=1000),
        replace(POLICY, local_retention_bytes=2 * segment_bytes),
        paused(KEEP_NOTHING, TierWork.TRIMMING),
    ]
    for policy in policies:
        for late_ms, lso, share_start in ((0, None, None), (-1, None, None), (0, 45, None), (0, None, 10**6)):
            copied.now_ms += late_ms
            copied.log.last_stable_offset, copied.share_groups.start = lso, share_start
            found = reasons(await answer_for(copied, policy), ON_BROKER)
            bounds = await copied.log.bounds(PARTITION, 1000)
            target = copied.trim_task.target(policy, bounds) if not policy.paused else 0
            is_without = policy.local_retention_ms is None and policy.local_retention_bytes is None
            trimmed = {start for start in (0, 30, 60) if start < target and not is_without}
            assert {start for start, reason in found.items() if reason == StateReason.DUE} == trimmed
            copied.now_ms -= late_ms


@pytest.mark.parametrize(
    ("policy", "now", "question", "expected"),
    [
        (POLICY, 0, ON_BROKER, HoldReason.NO_LOCAL_RETENTION),
        (paused(KEEP_NOTHING, TierWork.TRIMMING), 0, ON_BROKER, HoldReason.TRIMMING_PAUSED),
        (KEEP_NOTHING, -1, ON_BROKER, HoldReason.NOT_VISIBLE),
        (replace(POLICY, local_retention_ms=60_000), 0, ON_BROKER, HoldReason.LOCAL_RETENTION),
        (replace(POLICY, local_retention_bytes=10**9), 0, ON_BROKER, HoldReason.LOCAL_RETENTION),
        (KEEP_NOTHING, 0, ON_BROKER, StateReason.DUE),
        (POLICY, 0, NOT_EXPIRED, HoldReason.UNLIMITED_RETENTION),
        (paused(MINUTE, TierWork.EXPIRING), 0, NOT_EXPIRED, HoldReason.EXPIRING_PAUSED),
        (replace(MINUTE, total_to_record=TotalRetention(1)), 0, NOT_EXPIRED, HoldReason.RETENTION_UNKNOWN),
        (replace(POLICY, is_doubtful=True), 0, NOT_EXPIRED, HoldReason.RETENTION_IN_DOUBT),
        (Refusal("orders", "cleanup.policy is 'compact'"), 0, NOT_EXPIRED, StateReason.NOT_TIERED),
    ],
)
async def test_why_a_segment_is_still_there(
    copied: Workbench, policy: TopicPolicy | Refusal, now: int, question: Question, expected: str
) -> None:
    copied.now_ms += now
    found = whys(await answer_for(copied, policy), question)[0]
    assert found.reason == expected
    assert found.sentence.endswith(".")


async def test_the_rule_and_the_time_are_told(copied: Workbench) -> None:
    policy = replace(POLICY, local_retention_ms=60_000)
    copied.wall_ms = copied.segments[0].max_timestamp_ms + 1000
    found = whys(await answer_for(copied, policy), ON_BROKER)[0]
    assert found.at_ms == copied.wall_ms + 59_001
    assert found.rule == "docs/design.md, 'Log range'"
    assert "when its newest record is 1 min old (local.retention.ms, from the file); it is 1 s" in found.sentence
    copied.wall_ms += 59_000
    assert await copied.trim(policy) is None
    copied.wall_ms += 1
    assert await copied.trim(policy) == 60


async def test_the_bytes_that_let_a_segment_go_are_told(copied: Workbench) -> None:
    later_bytes = sum(each.segment_size_bytes for each in copied.segments[1:])
    total_bytes = later_bytes + MIN_BATCH_BYTES + 700
    policy = replace(
        POLICY,
        local_retention_bytes=later_bytes + 500,
        retention_bytes=total_bytes,
        tier_settings={"local.retention.bytes": str(later_bytes + 500)},
    )
    answer = await answer_for(copied, policy)
    assert whys(answer, ON_BROKER)[0].sentence == (
        "The local retention covers the segment. The owner may trim it when another 500 B follow it in its partition"
        f" (local.retention.bytes, from the topic: {size_text(later_bytes + 500)} per partition)."
    )
    assert whys(answer, NOT_EXPIRED)[0].sentence == (
        "The total retention covers the segment. It expires when another 700 B follow it in its partition"
        f" (retention.bytes: {size_text(total_bytes)} per partition)."
    )
    recorded = await answer_for(copied, replace(policy, recorded_total=TotalRetention(None, total_bytes)))
    assert "(remote.log.retention.bytes: " in whys(recorded, NOT_EXPIRED)[0].sentence


async def test_a_pause_names_the_command_that_ends_it(copied: Workbench) -> None:
    answer = await answer_for(copied, paused(KEEP_NOTHING, TierWork.TRIMMING))
    command = "`tidegate tier resume orders --trimming --yes` ends the pause."
    assert command in whys(answer, ON_BROKER)[0].sentence
    assert any(command in note for note in answer.notes)


async def test_the_newest_segment_stays_and_the_later_wait_for_the_earlier(copied: Workbench) -> None:
    assert reasons(await answer_for(copied, KEEP_NOTHING), ON_BROKER)[60] == HoldReason.NEWEST_SEGMENT
    del copied.metadata.seen[copied.segments[0].segment_id]
    found = whys(await answer_for(copied, KEEP_NOTHING), ON_BROKER)
    assert (found[0].reason, found[30].reason) == (HoldReason.NOT_VISIBLE, StateReason.BEHIND_EARLIER)
    assert "from offset 0 on is held" in found[30].sentence


async def test_an_open_transaction_and_a_share_group_hold_a_trim(copied: Workbench) -> None:
    copied.log.last_stable_offset = 29
    assert reasons(await answer_for(copied, KEEP_NOTHING), ON_BROKER)[0] == HoldReason.ABOVE_LSO
    copied.log.last_stable_offset, copied.share_groups.start = None, 29
    found = reasons(await answer_for(copied, KEEP_NOTHING), ON_BROKER)
    assert (found[0], found[30]) == (StateReason.SHARE_GROUP, StateReason.BEHIND_EARLIER)


async def test_records_that_are_not_remote_hold_the_segments_after_them(copied: Workbench) -> None:
    del copied.metadata.segments[copied.segments[0].segment_id]
    found = whys(await answer_for(copied, KEEP_NOTHING), ON_BROKER)
    assert found[30].reason == StateReason.UNCOPIED_BEFORE
    assert "has records from offset 0 on" in found[30].sentence


async def test_a_void_segment_goes_with_the_retention(copied: Workbench) -> None:
    await copied.metadata.put_cut(PARTITION, 1, 30)
    answer = await answer_for(copied, KEEP_NOTHING)
    assert reasons(answer, NOT_EXPIRED)[30] == StateReason.VOID
    assert [(each.start_offset, each.end_offset) for each in answer.segments] == [(0, 29), (30, 59), (60, 89)]
    copied.log.log_start_offset = 60
    lost = Explanation(await facts_for(copied, KEEP_NOTHING)).offset(45)
    assert (lost.place, "void" in lost.sentence) == (Place.UNKNOWN, True)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (POLICY, HoldReason.NOT_DUE),
        (paused(POLICY, TierWork.COPYING), HoldReason.COPYING_PAUSED),
        (replace(POLICY, copy_disable=True), HoldReason.COPY_DISABLED),
        (Refusal("orders", "cleanup.policy is 'compact'"), StateReason.NOT_TIERED),
        (None, StateReason.NOT_TIERED),
    ],
)
async def test_why_records_are_not_yet_remote(
    copied: Workbench, policy: TopicPolicy | Refusal | None, expected: str
) -> None:
    copied.log.last_stable_offset = 95
    answer = (await answer_for(copied, policy)).uncopied
    assert (answer.first_offset, answer.next_offset) == (90, 100)
    assert [each.reason for each in answer.whys] == [expected, StateReason.OPEN_TRANSACTION]
    copied.log.last_stable_offset = 90
    assert [each.reason for each in (await answer_for(copied, policy)).uncopied.whys] == [StateReason.OPEN_TRANSACTION]


async def test_the_owner_alone_knows_when_a_copy_is_due(copied: Workbench) -> None:
    (why,) = (await answer_for(copied, POLICY)).uncopied.whys
    assert why.at_ms is None
    assert "The owner alone knows the size of these, and how old they are." in why.sentence
    hold = Hold(HoldReason.NOT_DUE, copied.wall_ms + 40_000, {"segment.ms": POLICY.segment_ms})
    (why,) = (await answer_for(copied, POLICY, copy_hold=hold)).uncopied.whys
    assert (why.reason, why.at_ms) == (HoldReason.NOT_DUE, copied.wall_ms + 40_000)
    owners: list[tuple[dict[str, Any], StateReason]] = [
        ({"copy_hold": replace(hold, at_ms=copied.wall_ms)}, StateReason.DUE),
        ({"name": ""}, StateReason.NO_OWNER),
        ({"unfit": "no disk"}, StateReason.OWNER_UNFIT),
    ]
    for owner, expected in owners:
        assert (await answer_for(copied, POLICY, **owner)).uncopied.whys[0].reason == expected


async def test_a_copy_that_was_left_is_told(copied: Workbench) -> None:
    begun = replace(copied.segments[2], segment_id=replace(copied.segments[2].segment_id, id=PARTITION.topic_id))
    begun = replace(begun, start_offset=90, end_offset=99, state=type(begun.state).COPY_SEGMENT_STARTED)
    await copied.metadata.add_remote_log_segment_metadata(begun)
    assert reasons(await answer_for(copied, POLICY), NOT_REMOTE)[90] == StateReason.COPY_BEGUN
    copied.wall_ms += 60_000
    answer = await answer_for(copied, POLICY)
    assert reasons(answer, NOT_REMOTE)[90] == StateReason.COPY_LEFT
    assert answer.uncopied.whys[0].reason == StateReason.COPY_LEFT


async def test_a_segment_expires_when_the_explanation_says(copied: Workbench) -> None:
    newest_ms = copied.segments[0].max_timestamp_ms
    found = whys(await answer_for(copied, MINUTE), NOT_EXPIRED)[0]
    assert (found.reason, found.at_ms) == (HoldReason.TOTAL_RETENTION, newest_ms + 60_001)
    copied.wall_ms = newest_ms + 60_001
    assert reasons(await answer_for(copied, MINUTE), NOT_EXPIRED)[0] == StateReason.DUE
    await copied.expire(MINUTE)
    assert await copied.log_start() == 90


async def test_a_timestamp_in_the_future_says_why_nothing_expires(bench: Workbench) -> None:
    for n in range(6):
        bench.log.append(batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms + (n == 1) * 10**14))
    await bench.copy_all()
    bench.wall_ms += 60_001
    found = whys(await answer_for(bench, MINUTE), NOT_EXPIRED)[0]
    assert (found.reason, found.at_ms) == (HoldReason.FUTURE_TIMESTAMP, bench.segments[0].max_timestamp_ms + 60_001)
    assert "A record of the segment has a timestamp in the future: 5" in found.sentence


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"total_conflict": "the file has 1, and 2 is recorded"}, "expires: the file has 1, and 2 is recorded."),
        (
            {"total_to_record": TotalRetention(1)},
            "expires: the total of the file, remote.log.retention.minutes=1, is not recorded yet.",
        ),
    ],
)
async def test_a_total_that_is_not_agreed_on_is_named(copied: Workbench, differs: dict[str, Any], said: str) -> None:
    found = whys(await answer_for(copied, replace(POLICY, **differs)), NOT_EXPIRED)[0]
    assert found.sentence.endswith(said)


async def test_a_stop_and_a_failing_stage_come_before_every_setting(copied: Workbench) -> None:
    stopped = await answer_for(copied, KEEP_NOTHING, stopped="it was emptied")
    in_doubt = await answer_for(copied, KEEP_NOTHING, doubt="the metadata was lost")
    for answer, reason in ((stopped, StateReason.STOPPED), (in_doubt, StateReason.DOUBT)):
        for question in (ON_BROKER, NOT_EXPIRED):
            assert set(reasons(answer, question).values()) == {reason}
    assert [each.reason for each in stopped.uncopied.whys] == [StateReason.STOPPED]
    assert [each.reason for each in in_doubt.uncopied.whys] == [HoldReason.NOT_DUE]
    failing = await answer_for(copied, KEEP_NOTHING, troubles={"trim": "the store lacks a segment"})
    assert reasons(failing, ON_BROKER)[0] == StateReason.STAGE_FAILS
    assert reasons(failing, NOT_EXPIRED)[0] == HoldReason.UNLIMITED_RETENTION
    for owner, expected in (({"name": ""}, StateReason.NO_OWNER), ({"unfit": "full"}, StateReason.OWNER_UNFIT)):
        assert reasons(await answer_for(copied, KEEP_NOTHING, **owner), ON_BROKER)[0] == expected


async def test_where_an_offset_is(copied: Workbench) -> None:
    await copied.trim(KEEP_NOTHING)
    facts = await facts_for(copied, KEEP_NOTHING)
    found = {offset: Explanation(facts).offset(offset) for offset in (0, 59, 60, 89, 90, 99, 100)}
    assert {offset: each.place for offset, each in found.items()} == {
        0: Place.REMOTE,
        59: Place.REMOTE,
        60: Place.BOTH,
        89: Place.BOTH,
        90: Place.LOCAL,
        99: Place.LOCAL,
        100: Place.BEYOND_END,
    }
    assert "not known" not in found[59].sentence
    assert found[59].segment is not None
    assert found[59].segment.object in await copied.objects()
    unread = Explanation(await facts_for(copied, paused(KEEP_NOTHING, TierWork.READING)))
    assert any("An operator paused reading" in note for note in unread.partition().notes)


async def test_an_offset_that_has_no_record_says_where_a_fetch_goes_on(copied: Workbench) -> None:
    await copied.trim(KEEP_NOTHING)
    await copied.record_log_start(5)
    deleted = Explanation(await facts_for(copied, KEEP_NOTHING)).offset(4)
    assert (deleted.place, deleted.continues_at) == (Place.DELETED, 5)
    assert "(reason: USER)" in deleted.sentence
    del copied.metadata.segments[copied.segments[1].segment_id]
    lost = Explanation(await facts_for(copied, KEEP_NOTHING)).offset(40)
    assert lost.place is Place.UNKNOWN
    await copied.metadata.put_log_gap(PARTITION, LogGap(30, 60), 0)
    facts = await facts_for(copied, KEEP_NOTHING)
    gap = Explanation(facts).offset(40)
    assert (gap.place, gap.continues_at) == (Place.GAP, 60)
    assert "the offsets 30 to 59 before" in gap.sentence
    assert any("offsets 30 to 59 are a gap" in note for note in Explanation(facts).partition().notes)


async def test_an_offset_whose_metadata_was_lost_is_not_called_deleted(copied: Workbench) -> None:
    await copied.trim(KEEP_NOTHING)
    for each in copied.segments[:2]:
        del copied.metadata.segments[each.segment_id]
    lost = Explanation(await facts_for(copied, KEEP_NOTHING)).offset(10)
    assert (lost.place, "an error that it retries" in lost.sentence) == (Place.UNKNOWN, True)


@pytest.mark.parametrize(("log_start", "goes"), [(29, False), (30, True)])
async def test_a_segment_below_the_log_start_goes(copied: Workbench, log_start: int, goes: bool) -> None:
    await copied.trim(KEEP_NOTHING)
    await copied.record_log_start(log_start)
    found = reasons(await answer_for(copied, MINUTE), NOT_EXPIRED)[0]
    assert (found == StateReason.BELOW_LOG_START) is goes
    if goes:
        held = await answer_for(copied, paused(MINUTE, TierWork.EXPIRING))
        assert reasons(held, NOT_EXPIRED)[0] == HoldReason.EXPIRING_PAUSED


async def test_a_log_start_above_the_brokers_hides_nothing(copied: Workbench) -> None:
    """As for clients: the owner deletes the records again, or ends the log start."""
    await copied.metadata.put_log_start(PARTITION, user_log_start(50, leader_epoch=0))
    facts = await facts_for(copied, KEEP_NOTHING)
    assert (Explanation(facts).partition().log_start, Explanation(facts).offset(10).place) == (0, Place.BOTH)


async def test_without_the_leader_the_remote_tier_is_still_explained(copied: Workbench) -> None:
    facts = replace(await facts_for(copied, KEEP_NOTHING), local=None, local_trouble="no broker answers")
    answer = Explanation(facts).partition()
    assert reasons(answer, ON_BROKER)[0] == StateReason.LEADER_UNKNOWN
    assert any("no broker answers" in note for note in answer.notes)
    assert Explanation(facts).offset(10).place is Place.REMOTE
    assert Explanation(facts).offset(95).place is Place.UNKNOWN
    await copied.trim(KEEP_NOTHING)
    assert set(reasons(Explanation(facts).partition(), ON_BROKER)) == {60}


async def test_a_time_leads_to_the_first_segment_that_may_have_it(copied: Workbench) -> None:
    facts = await facts_for(copied, POLICY)
    first = Explanation(facts).segment_at_time(copied.wall_ms - 1_000_000)
    assert first is not None
    assert first.start_offset == 0
    assert Explanation(facts).segment_at_time(copied.wall_ms + 1_000_000) is None
