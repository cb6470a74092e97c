"""The facts of the workbench's partition, as its owner knows them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.config.topic_policy import Refusal, TopicPolicy
from tiers.explain.answers import PartitionAnswer, Question, Why
from tiers.explain.explain import Explanation
from tiers.explain.facts import LocalFacts, OwnerFacts, PartitionFacts
from tiers.metadata.remote_log import RemoteLog


async def facts_for(bench: Workbench, policy: TopicPolicy | Refusal | None) -> PartitionFacts:
    metadata = bench.metadata
    seen = {each.segment_id: metadata.state.seen_at_ms(each.segment_id) for each in bench.segments}
    return PartitionFacts(
        RemoteLog(metadata.state, PARTITION),
        bench.wall_ms,
        policy,
        local=LocalFacts(
            await bench.log.bounds(PARTITION, 1000),
            share_start=bench.share_groups.start,
            uncopied_bytes=bench.copy_task.uncopied.size_bytes,
        ),
        owner=OwnerFacts(
            "tidegate-1",
            visible_for_ms={key: bench.now_ms - value for key, value in seen.items() if value is not None},
        ),
        visible_after_ms=bench.services.settings.remote_log.visible_after_ms,
        cluster_id="cluster",
    )


async def answer_for(bench: Workbench, policy: TopicPolicy | Refusal | None, **owner: Any) -> PartitionAnswer:
    """The explanation; `owner` has the fields of the owner's facts that differ."""
    facts = await facts_for(bench, policy)
    return Explanation(replace(facts, owner=replace(facts.owner, **owner))).partition()


def whys(answer: PartitionAnswer, question: Question) -> dict[int, Why]:
    """The answers to one question, by the segment's start offset."""
    return {
        segment.start_offset: why for segment in answer.segments for why in segment.whys if why.question is question
    }


def reasons(answer: PartitionAnswer, question: Question) -> dict[int, str]:
    return {start: why.reason for start, why in whys(answer, question).items()}
