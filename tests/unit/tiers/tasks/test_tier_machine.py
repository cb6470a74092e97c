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
from tests.support.tiers.tier_machine import Tier

EXAMPLES = int(os.environ.get("TIDEGATE_EXAMPLES", "15"))
SETTINGS = settings(
    max_examples=EXAMPLES,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def test_the_tier_does_what_the_model_says() -> None:
    run_state_machine_as_test(Tier, settings=SETTINGS)


def played(history: Callable[[Tier], None]) -> None:
    tier = Tier()
    try:
        tier.start()
        history(tier)
        tier.everything_is_readable()
    finally:
        tier.teardown()


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
