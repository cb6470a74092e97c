"""A copy that does not come to its end is seen from outside the process that tries it."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from uuid import uuid4

from proxy.commands.tier.topics import TieredTopic, tiered_topics
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CommandBench
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

MINUTE_MS = 60_000


async def listed(bench: CommandBench) -> TieredTopic:
    """An existing topic whose settings no broker names."""

    async def no_configs(*args: Any, **options: Any) -> Any:
        return SimpleNamespace(results=[])

    known = SimpleNamespace(partitions={PARTITION.partition: None})
    tier = bench.tier()
    cluster = SimpleNamespace(topics={}, topics_by_id={PARTITION.topic_id: known})
    client = SimpleNamespace(request=no_configs)
    (line,) = await tiered_topics(replace(tier, cluster=cast(Any, cluster), client=cast(Any, client)))
    return line


async def begun(bench: CommandBench, segment: RemoteLogSegmentMetadata, ago_ms: int) -> int:
    """An attempt at `segment`'s range; returns when it was begun."""
    began_ms = time.time_ns() // 1_000_000 - ago_ms
    attempt = replace(
        segment,
        segment_id=RemoteLogSegmentId(PARTITION, uuid4()),
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )
    bench.rlmm.wall_clock_ms = lambda: began_ms
    await bench.rlmm.add_remote_log_segment_metadata(attempt)
    return began_ms


async def test_attempts_that_were_left_are_shown_until_one_succeeds(bench: CommandBench) -> None:
    await bench.tiered(0)
    assert (await listed(bench)).copy_fails_since_ms is None
    following = await bench.stored(10)
    await begun(bench, following, ago_ms=MINUTE_MS // 2)
    assert (await listed(bench)).copy_fails_since_ms is None
    await begun(bench, following, ago_ms=2 * MINUTE_MS)
    oldest_ms = await begun(bench, following, ago_ms=20 * MINUTE_MS)
    assert (await listed(bench)).copy_fails_since_ms == oldest_ms
    await bench.tiered(10)
    assert (await listed(bench)).copy_fails_since_ms is None
