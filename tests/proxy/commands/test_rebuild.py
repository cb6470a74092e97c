"""What the command adds to a plan: topics that the cluster does not have."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.fakes.segments import PARTITION
from tests.proxy.commands.command_bench import CLUSTER_ID, CommandBench
from tiers.rebuilding import Rebuild, judge_unknown_topics, plan_rebuild


async def planned(bench: CommandBench) -> Rebuild:
    return await plan_rebuild(bench.storage, CLUSTER_ID, bench.ring, 1)


@pytest.mark.parametrize("are_meant", [True, False])
async def test_a_topic_that_the_cluster_does_not_have_is_refused_unless_it_is_meant(
    bench: CommandBench, are_meant: bool
) -> None:
    await bench.tiered(0)
    await bench.put_manifest()
    done = await planned(bench)
    judge_unknown_topics(done.plans, {UUID(int=99)}, are_meant)
    assert done.undecided == []
    judge_unknown_topics(done.plans, {PARTITION.topic_id}, are_meant)
    assert done.undecided == ([] if are_meant else done.plans)
    [plan] = done.plans
    assert "the cluster has no topic with the id" in (plan.notes + plan.refused)[-1]


async def test_of_an_unknown_topic_nothing_is_refused_when_nothing_is_left(bench: CommandBench) -> None:
    await bench.tiered(0)
    await bench.put_manifest()
    for file in bench.files():
        if file.name != "manifest.json":
            file.unlink()
    done = await planned(bench)
    judge_unknown_topics(done.plans, {PARTITION.topic_id}, False)
    assert (len(done.plans), done.undecided) == (1, [])
