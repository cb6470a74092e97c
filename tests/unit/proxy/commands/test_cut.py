"""`tidegate tier cut` names the offset from which the leader's log has other records than the tier."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from proxy.commands.tier import cut
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CommandBench, Tidegate, open_by
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogStart, LogStartReason
from tiers.model.segment_metadata import Cut
from tiers.tasks.history.align import Parting

NAME = f"{PARTITION.topic}-{PARTITION.partition}"
CUT = "tier", "cut", f"{PARTITION.topic}:{PARTITION.partition}"


@pytest.fixture(autouse=True)
async def log(bench: CommandBench, monkeypatch: pytest.MonkeyPatch) -> InMemoryLog:
    """The broker was emptied: twenty records are remote, and its log has ten."""
    await bench.tiered(0)
    await bench.tiered(10)
    made = InMemoryLog(batch_of(0, 10, leader_epoch=3), leader_epoch=3)
    open_by(cut, bench, made, monkeypatch)
    return made


def cuts(bench: CommandBench) -> list[tuple[int, int, bool]]:
    return [(each.leader_epoch, each.offset, each.is_proved) for each in bench.state.cuts(PARTITION)]


def test_without_yes_it_shows_what_becomes_void(bench: CommandBench, tidegate: Tidegate) -> None:
    code, out, err = tidegate(*CUT, "5")
    assert (code, err, cuts(bench)) == (0, "Nothing was written. Use --yes to write.\n", [])
    assert "the leader of epoch 3 has other records than the tier from offset 0 on" in out
    assert f"{NAME}: a CUT at offset 5 in leader epoch 3 voids 15 offsets in 2 segments with " in out
    found = json.loads(tidegate(*CUT, "0", "--json")[1])
    assert found["parting"] == {"offset": 0, "is_proved": False, "is_ambiguous": False}
    assert (found["cuts"], found["void"]["offsets"]) == ([{"leader_epoch": 3, "offset": 0}], 20)
    assert (found["needed"], found["written"]) == (True, False)


def test_it_says_that_the_leader_lacks_void_records(bench: CommandBench, log: InMemoryLog, tidegate: Tidegate) -> None:
    log.log_start_offset = 7
    assert f"{NAME}: the leader's log begins at offset 7, and lacks the records below it" in tidegate(*CUT, "5")[1]
    assert "and lacks the records" not in tidegate(*CUT, "7")[1]


def test_it_writes_once_and_then_finds_nothing_to_cut(bench: CommandBench, tidegate: Tidegate) -> None:
    code, _, err = tidegate(*CUT, "0", "--yes")
    assert (code, "The CUT was written." in err, cuts(bench)) == (0, True, [(3, 0, True)])
    code, _, err = tidegate(*CUT, "0", "--yes")
    assert (code, err) == (0, f"{NAME}: nothing to cut from offset 0 on. Nothing was written.\n")


async def test_it_needs_no_ownership_and_ends_void_log_starts(bench: CommandBench) -> None:
    await bench.rlmm.put_log_start(PARTITION, LogStart(4, 0, LogStartReason.USER))
    bench.rlmm.owned = False
    bounds = LocalLogBounds(0, 10, 10, 3)
    for each in cut.named_cuts(bench.state, PARTITION, bounds, 0, Parting(0, is_proved=False)):
        await bench.rlmm.put_named_cut(PARTITION, each)
    assert (cuts(bench), bench.state.log_starts(PARTITION)) == ([(3, 0, True)], [])


async def test_nothing_is_cut_while_the_leader_continues_the_tier(bench: CommandBench) -> None:
    """The first run of the command was in leader epoch 3. A clean election came since."""
    await bench.rlmm.put_named_cut(PARTITION, Cut(3, 0, 0))
    assert cut.named_cuts(bench.state, PARTITION, LocalLogBounds(0, 90, 90, 4), 0, None) == []


async def test_a_cut_that_was_not_proved_gets_the_offset(bench: CommandBench) -> None:
    """A CUT of the present leader epoch would void what was copied since."""
    await bench.rlmm.put_cut(PARTITION, 3, 15, is_proved=False)
    for offset, void in ((12, 3), (15, 0)):
        named = cut.named_cuts(bench.state, PARTITION, LocalLogBounds(15, 90, 90, 7), offset, None)
        assert [(each.leader_epoch, each.offset, each.is_proved) for each in named] == [(3, offset, True)]
        assert cut.void_records(bench.state, PARTITION, named).offsets == void


def test_a_leader_that_changes_before_the_write_is_an_error(
    bench: CommandBench, log: InMemoryLog, tidegate: Tidegate, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked = log.bounds, 0

    async def bounds(*arguments: Any) -> LocalLogBounds:
        nonlocal asked
        asked += 1
        log.leader_epoch = 3 if asked < 3 else 4
        return await ask(*arguments)

    monkeypatch.setattr(log, "bounds", bounds)
    code, _, err = tidegate(*CUT, "0", "--yes")
    assert (code, "has another leader now: run the command again" in err, cuts(bench)) == (3, True, [])


@pytest.mark.parametrize("offset", ["0", "15"])
async def test_a_leader_older_than_a_cut_is_refused(bench: CommandBench, tidegate: Tidegate, offset: str) -> None:
    """The broker may be cut off from the controllers."""
    await bench.rlmm.put_cut(PARTITION, 5, 15, is_proved=False)
    code, out, err = await asyncio.to_thread(tidegate, *CUT, offset, "--yes")
    assert (code, out, err.count("\n"), cuts(bench)) == (3, "", 1, [(5, 15, False)])
    assert "The broker that answers leads in epoch 3" in err
