"""What the command adds to a plan: topics that the cluster does not have."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench
from tiers.access.open_tier import RemoteTierError
from tiers.errors import RetriableRemoteStorageError
from tiers.metadata.partition_manifest import PartitionManifest, decode_partition_manifest
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
from tiers.tasks.partition_manifest import manifest_of, read_manifest
from tiers.upkeep.rebuild import Rebuild, judge_unknown_topics, manifests_of, plan_rebuild, write_manifests


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


NEW_POSITION = MetadataPosition(UUID(int=77), 3, 12)


async def stored(bench: CommandBench) -> PartitionManifest | None:
    content = await read_manifest(bench.storage, CLUSTER_ID, PARTITION)
    return None if content is None else decode_partition_manifest(content)


async def test_the_manifests_name_the_new_topic_then(bench: CommandBench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.tiered(0)
    await bench.put_manifest()
    await bench.tiered(10)
    done = await planned(bench)
    monkeypatch.setattr(bench.rlmm, "position", lambda partition: NEW_POSITION)
    await write_manifests(bench.storage, manifests_of(done.plans, bench.rlmm, CLUSTER_ID))
    found = await stored(bench)
    assert found == manifest_of(bench.rlmm, CLUSTER_ID, found.topic_id_partition if found else PARTITION)
    assert found is not None
    assert (found.position, [each.start_offset for each in found.segments]) == (NEW_POSITION, [0, 10])


async def test_where_no_manifest_was_none_is_written(bench: CommandBench) -> None:
    """The rebuilt metadata is no witness of itself."""
    await bench.tiered(0)
    done = await planned(bench)
    assert [len(plan.segments) for plan in done.plans] == [1]
    await write_manifests(bench.storage, manifests_of(done.plans, bench.rlmm, CLUSTER_ID))
    assert await stored(bench) is None


async def test_a_manifest_that_cannot_be_written_is_no_success(
    bench: CommandBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bench.tiered(0)
    await bench.put_manifest()
    manifests = manifests_of((await planned(bench)).plans, bench.rlmm, CLUSTER_ID)

    async def put_object(key: str, data: bytes) -> None:
        raise RetriableRemoteStorageError("503")

    monkeypatch.setattr(bench.storage, "put_object", put_object)
    with pytest.raises(RemoteTierError, match=r"the metadata was written, but .* delete the new metadata topic"):
        await write_manifests(bench.storage, manifests)
