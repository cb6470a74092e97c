"""The command adds one check to a plan: topics that the cluster does not have."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench
from tiers.access.open_tier import RemoteTierError
from tiers.broker.client import BrokerClient
from tiers.commands.rebuild_report import show_rebuild
from tiers.metadata.topic.group.group_members import OwnerMember
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.upkeep.importing import refuse_beside_owners
from tiers.upkeep.rebuild import (
    Rebuild,
    RebuildOptions,
    compare,
    judge_unknown_topics,
    plan_rebuild,
    topics_replaced,
)
from tiers.upkeep.runner import HereRunner, OpenedStore


async def planned(bench: CommandBench) -> Rebuild:
    return await plan_rebuild(OpenedStore(bench.storage, CLUSTER_ID, bench.ring), HereRunner())


@pytest.mark.parametrize("are_meant", [True, False])
async def test_a_topic_that_is_not_in_the_cluster_needs_an_option(bench: CommandBench, are_meant: bool) -> None:
    await bench.tiered(0)
    await bench.put_facts()
    done = await planned(bench)
    judge_unknown_topics(done.plans, {UUID(int=99)}, are_meant)
    assert done.undecided == []
    judge_unknown_topics(done.plans, {PARTITION.topic_id}, are_meant)
    assert done.undecided == ([] if are_meant else done.plans)
    [plan] = done.plans
    assert "the cluster has no topic with the id" in (plan.notes + plan.refused)[-1]
    for file in bench.files():
        if file.suffix != ".facts":
            file.unlink()
    done = await planned(bench)
    judge_unknown_topics(done.plans, {PARTITION.topic_id}, False)
    assert (len(done.plans), done.undecided) == (1, [])


async def compared(bench: CommandBench) -> Rebuild:
    done = await planned(bench)
    done.topic, done.taken = "__metadata", 5
    await compare(done, bench.rlmm.log)
    return done


@pytest.mark.parametrize("is_applied", [True, False])
async def test_a_complete_metadata_topic_needs_no_rebuild(
    bench: CommandBench, capsys: pytest.CaptureFixture[str], is_applied: bool
) -> None:
    await bench.tiered(0)
    await bench.rlmm.put_log_start(PARTITION, LogStart(3, 0, LogStartReason.USER))
    await bench.rlmm.put_local_log_start(PARTITION, OffsetAndEpoch(5, 0))
    await bench.rlmm.put_log_gap(PARTITION, LogGap(10, 20), 0)
    await bench.put_facts()
    done = await compared(bench)
    assert done.is_needless
    show_rebuild(done, RebuildOptions(is_applied=is_applied), "--yes", as_json=False)
    captured = capsys.readouterr()
    assert captured.out.rstrip().endswith("already in the metadata")
    assert "Nothing needs a rebuild: topic __metadata already has" in captured.err


@pytest.mark.parametrize("lost", ["segment", "log start", "trim", "gap", "cut", "settings", "records"])
async def test_segments_that_the_metadata_topic_lacks_are_counted(
    bench: CommandBench, lost: str, capsys: pytest.CaptureFixture[str]
) -> None:
    await bench.tiered(0)
    lost_segment = await bench.tiered(10) if lost == "segment" else None
    match lost:
        case "log start":
            await bench.rlmm.put_log_start(PARTITION, LogStart(3, 0, LogStartReason.USER))
        case "trim":
            await bench.rlmm.put_local_log_start(PARTITION, OffsetAndEpoch(5, 0))
        case "gap":
            await bench.rlmm.put_log_gap(PARTITION, LogGap(10, 20), 0)
        case "cut":
            await bench.rlmm.put_cut(PARTITION, 7, 500, is_proved=False)
        case "settings":
            await bench.rlmm.change_topic_tier_config(PARTITION.topic_id, PARTITION.topic, {"local.retention.ms": "1"})
    await bench.put_facts()
    left = CommandBench(bench.folder / "left", bench.storage).rlmm
    for segment in bench.state.list_remote_log_segments(PARTITION):
        if lost_segment is None or segment.segment_id != lost_segment.segment_id:
            await left.add_remote_log_segment_metadata(
                replace(segment, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
            )
            update = RemoteLogSegmentMetadataUpdate(segment.segment_id, 1, 1, segment.state)
            await left.update_remote_log_segment_metadata(update)
    left.written = bench.rlmm.written
    left.is_position_confirmed = lost != "records"
    bench.rlmm = left
    done = await compared(bench)
    assert (done.lacking, done.is_needless) == ({PARTITION: 1}, False)
    show_rebuild(done, RebuildOptions(), "--yes", as_json=False)
    captured = capsys.readouterr()
    assert "records not in the metadata: 1" in captured.out
    assert "topic __metadata is not empty, and lacks records that the store has: 1" in captured.err


async def test_a_rebuild_waits_for_the_owners_of_both_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `--into`, the owners of the topic that is replaced may still run."""

    async def group_members(client: BrokerClient, topic: str, timeout_ms: int) -> list[OwnerMember]:
        return [OwnerMember("member", "host", frozenset(), is_fit=True)] if topic == "__old" else []

    monkeypatch.setattr("tiers.upkeep.importing.group_members", group_members)
    client = BrokerClient([("127.0.0.1", 1)], client_id="test")
    await refuse_beside_owners(client, ["__new"])
    with pytest.raises(RemoteTierError, match="1 process owns partitions of __old"):
        await refuse_beside_owners(client, ["__new", "__old"])
    assert topics_replaced("__old", RebuildOptions(into="__new")) == ["__old", "__new"]
    assert topics_replaced("__old", RebuildOptions()) == ["__old"]
