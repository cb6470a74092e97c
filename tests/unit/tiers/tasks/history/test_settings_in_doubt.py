"""A longer total retention and a pause stay, also if only facts without a position have them when metadata is lost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench, copied
from tiers.config.topic_policy import TierWork
from tiers.config.total_retention import RETENTION_BYTES, RETENTION_MINUTES
from tiers.errors import MetadataLostError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.history.stored_facts import read_stored_facts
from tiers.upkeep.rebuild import judge_scan, scan_store
from tiers.upkeep.rebuild_plan import tier_configs_of
from tiers.upkeep.runner import HereRunner, OpenedStore

SHORT = {RETENTION_MINUTES: "30", RETENTION_BYTES: "-1"}
HELD = {RETENTION_MINUTES: "-1", RETENTION_BYTES: "-1", TierWork.EXPIRING.key: "true"}


async def sets(bench: Workbench, config: Mapping[str, str]) -> None:
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, PARTITION.topic, config)


async def copies_more(bench: Workbench) -> None:
    at = bench.log.end_offset
    bench.log.append(*(batch_of(at + 10 * number, 10, value_bytes=15) for number in range(3)))
    await bench.copy_all()


async def stored_alone(bench: Workbench) -> None:
    for _ in range(4):
        await bench.facts_task.run()


async def rebuilt(bench: Workbench) -> Mapping[str, str]:
    """Returns the tier settings that `rebuild` restores."""
    done = judge_scan(await scan_store(OpenedStore(bench.store, "cluster", KeyRing()), HereRunner(), 1))
    [update] = tier_configs_of(done.plans, "rebuild", 0)
    return update.config


def loses(bench: Workbench, known: Mapping[RemoteLogSegmentId, RemoteLogSegmentMetadata], written: int) -> None:
    """The metadata topic loses its tail, and the owner restarts."""
    bench.metadata.segments = dict(known)
    bench.metadata.written = written
    bench.metadata.tier_configs[PARTITION] = SHORT
    bench.restart()


@pytest.mark.parametrize("is_carried", [True, False], ids=["with-a-copy", "alone"])
@pytest.mark.parametrize("is_in_doubt", [True, False], ids=["in-doubt", "before-the-first-look"])
async def test_rebuild_and_accept_keep_them(bench: Workbench, is_carried: bool, is_in_doubt: bool) -> None:
    await sets(bench, SHORT)
    await bench.check_facts()
    await copied(bench)
    bench.restart()
    if is_in_doubt:
        bench.metadata.is_position_confirmed = False
        with pytest.raises(MetadataLostError):
            await bench.check_facts()
    known, written = dict(bench.metadata.segments), bench.metadata.written
    await sets(bench, HELD)
    if is_carried:
        await copies_more(bench)
    await stored_alone(bench)
    assert (await rebuilt(bench)).items() >= HELD.items()
    loses(bench, known, written)
    await bench.accept()
    assert bench.state.topic_tier_config(PARTITION.topic_id).items() >= HELD.items()


async def test_the_next_look_gives_them_a_position(bench: Workbench) -> None:
    """Then a loss of the settings alone is seen."""
    await sets(bench, SHORT)
    await bench.check_facts()
    await copied(bench)
    bench.restart()
    await sets(bench, HELD)
    await copies_more(bench)
    await bench.check_facts()
    await stored_alone(bench)
    stored = await read_stored_facts(bench.store, "cluster", PARTITION)
    assert any(each.tier_config == HELD for each in stored.all() if each.position is not None)


async def test_a_copy_beside_a_void_one_does_not_hide_them(bench: Workbench) -> None:
    """A look may read the `.indexes` object of the void copy, which has the same offsets."""
    await bench.check_facts()
    await copied(bench)
    bench.log.elect_unclean(60)
    bench.log.append(*(batch_of(at, 10, value_bytes=15, leader_epoch=1) for at in (60, 70, 80)))
    await sets(bench, HELD)
    for _ in range(2):
        await bench.copy(replace(POLICY, segment_ms=0))
    assert bench.finished.count((60, 89)) == 2
    await stored_alone(bench)
    facts = await read_stored_facts(bench.store, "cluster", PARTITION)
    assert HELD in [each.tier_config for each in facts.objects.values() if each.position is not None]


async def test_a_position_that_was_accepted_as_lost_hides_no_later_settings(bench: Workbench) -> None:
    """After a restore, the metadata partition uses its leader epochs again. Its positions lie below the lost one."""
    await sets(bench, SHORT)
    await bench.check_facts()
    await copied(bench)
    known, written = dict(bench.metadata.segments), bench.metadata.written
    for _ in range(6):
        await copies_more(bench)
    loses(bench, known, written)
    with pytest.raises(MetadataLostError):
        await bench.check_facts()
    await bench.accept()
    bench.restart()
    await bench.attempts.run(await bench.log.bounds(PARTITION, 1000), 0)
    bench.metadata.written = written + 3
    await bench.check_facts()
    await sets(bench, HELD)
    await stored_alone(bench)
    assert (await rebuilt(bench)).items() >= HELD.items()
