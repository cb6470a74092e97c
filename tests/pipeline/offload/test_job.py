"""The topics that an offload chooses."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.chosen_partitions import NothingChosenError
from pipeline.offload import job
from pipeline.offload.driver import OffloadOptions
from tests.support.tiers.workbench import POLICY
from tiers.config.topic_policy import TopicPolicy


async def test_a_pattern_that_matches_no_copied_topic_is_misuse(monkeypatch: pytest.MonkeyPatch) -> None:
    async def policies(tier: object) -> list[TopicPolicy]:
        return [replace(POLICY, topic="orders"), replace(POLICY, topic="logs", copy_disable=True)]

    monkeypatch.setattr(job, "tiered_policies", policies)
    tier: Any = SimpleNamespace()
    assert [each.topic for each in await job._policies(tier, OffloadOptions(topics=".*"))] == ["orders"]
    for topics, said in (("ordrs", "matches 'ordrs'; did you mean orders?"), ("logs", "matches 'logs'")):
        with pytest.raises(NothingChosenError) as raised:
            await job._policies(tier, OffloadOptions(topics=topics))
        assert str(raised.value) == f"no tiered topic with copying enabled {said}"
