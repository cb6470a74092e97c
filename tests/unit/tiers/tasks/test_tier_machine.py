"""The whole tier against a naive model: a list of batches, where the log starts, and which transactions were aborted.

Two processes share a metadata log and a store; each has its own state on disk. After every step each offset from the
log start on is in one of the tiers, and every proxy may read it, one that has not followed the metadata for T_vis / 2
too: the same bytes, the same records under read_committed, nothing below the log start or above the end. The log start
never goes back, and nothing expires that the topic's retention or a user did not ask for.

`test_it_sees_a_planted_bug` shows that this catches a trim before visibility, a segment expired too early, an aborted
transaction left out, and a skipped epoch check. `TIDEGATE_EXAMPLES` says how many histories are tried.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    run_state_machine_as_test,
)

from tests.support.fakes.io_calls import Event
from tests.support.fakes.tier_process import PARTITION
from tests.support.tiers.tier_machine import Tier
from tiers.config.topic_policy import TopicPolicy
from tiers.errors import RemoteLogError
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.segment.transactions import TransactionTracker
from tiers.tasks.history import align
from tiers.tasks.retention import trim_task
from tiers.tasks.retention.expiration_task import RLMExpirationTask

EXAMPLES = int(os.environ.get("TIDEGATE_EXAMPLES", "40"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_tier_does_what_the_model_says() -> None:
    run_state_machine_as_test(Tier, settings=SETTINGS)


def trim_before_it_is_visible(patch: pytest.MonkeyPatch) -> None:
    def seen_long_ago(self: object, segment_id: object) -> int:
        return 0

    patch.setattr(RemoteLogMetadataStateWriter, "seen_at_ms", seen_long_ago)


def expire_one_segment_too_many(patch: pytest.MonkeyPatch) -> None:
    expired_to = RLMExpirationTask._expired_to

    def one_more(task: RLMExpirationTask, policy: TopicPolicy, log_start: int, local_only_bytes: int) -> int:
        end = expired_to(task, policy, log_start, local_only_bytes)
        following = task._services.metadata.state.next_segment(PARTITION, end)
        return end if end == log_start or following is None else following.valid_end_offset + 1

    patch.setattr(RLMExpirationTask, "_expired_to", one_more)


def leave_out_an_aborted_transaction(patch: pytest.MonkeyPatch) -> None:
    ranges = TransactionTracker.ranges
    patch.setattr(TransactionTracker, "ranges", lambda tracker, end_offset: ranges(tracker, end_offset)[1:])


def skip_the_epoch_check(patch: pytest.MonkeyPatch) -> None:
    async def nothing(*_: object) -> None:
        return

    patch.setattr(align, "align", nothing)
    patch.setattr(trim_task, "require_aligned", nothing)


def fill_and_trim(tier: Tier) -> None:
    tier.produce(8, 12)
    tier.rounds([0])


def fill_and_expire(tier: Tier) -> None:
    for _ in range(3):
        tier.produce(8, 11)
    tier.produce(1, 4)
    tier.rounds([0] * 6)


def abort_and_copy(tier: Tier) -> None:
    tier.produce_in_a_transaction(1, 3)
    tier.end_a_transaction(commit=False, number=0)
    tier.produce(8, 12)
    tier.rounds([0])


def copy_and_lose(tier: Tier) -> None:
    tier.produce(8, 12)
    tier.rounds([0])
    tier.everything_is_readable()
    tier.elect_unclean(percent=50, batches=8)
    tier.rounds([0])


def played(history: Callable[[Tier], None]) -> None:
    tier = Tier()
    try:
        tier.start()
        history(tier)
        tier.everything_is_readable()
    finally:
        tier.teardown()


@pytest.mark.parametrize(
    ("plant", "history"),
    [
        (trim_before_it_is_visible, fill_and_trim),
        (expire_one_segment_too_many, fill_and_expire),
        (leave_out_an_aborted_transaction, abort_and_copy),
        (skip_the_epoch_check, copy_and_lose),
    ],
)
def test_it_sees_a_planted_bug(
    plant: Callable[[pytest.MonkeyPatch], None], history: Callable[[Tier], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short history finds it, since the search may not find it in time."""
    played(history)
    plant(monkeypatch)
    with pytest.raises((AssertionError, RemoteLogError)):
        played(history)


@pytest.mark.parametrize("call", [8, 9, 10, 11])
def test_a_deletion_inside_an_unfinished_copy_stops_nothing(call: int) -> None:
    """The first copy fails when it has begun, and then a user deletes a part of its records."""

    def history(tier: Tier) -> None:
        tier.produce_in_a_transaction(1, 3)
        tier.delete_records(0)
        tier.end_a_transaction(commit=False, number=0)
        tier.produce_in_a_transaction(1, 3)
        tier.end_a_transaction(commit=False, number=0)
        tier.fail_in_a_round(call, Event.FAILED_AFTER)
        tier.delete_records(4)

    played(history)
