"""`tidegate tier cut` names the offset from which the leader's log has other records than the tier."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy import cli
from proxy.commands.tier import cut
from proxy.commands.tier.bounds import PartitionBounds
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogStart, LogStartReason
from tiers.tasks.history.align import Parting

NAME = f"{PARTITION.topic}-{PARTITION.partition}"
Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def log() -> InMemoryLog:
    """The broker was emptied: twenty records are remote, and its log has ten."""
    return InMemoryLog(batch_of(0, 10, leader_epoch=3), leader_epoch=3)


@pytest.fixture
def run(
    bench: CommandBench,
    log: InMemoryLog,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Run:
    known = SimpleNamespace(topic_id=PARTITION.topic_id, partitions={PARTITION.partition: None})
    cluster = SimpleNamespace(topics={PARTITION.topic: known}, cluster_id=CLUSTER_ID)

    def giving(value: Any) -> Any:
        @asynccontextmanager
        async def opening(*args: Any, **options: Any) -> AsyncIterator[Any]:
            yield value

        return opening

    async def partition_bounds(*args: Any) -> PartitionBounds:
        return PartitionBounds(PARTITION.topic, PARTITION.partition)

    monkeypatch.setattr(cut, "tiered_cluster", giving((None, cluster)))
    monkeypatch.setattr(cut, "metadata_to_now", giving(bench.rlmm.log))
    monkeypatch.setattr(cut, "partition_bounds", partition_bounds)
    monkeypatch.setattr(cut, "BrokerLogSource", lambda client: log)
    path = tmp_path / "tidegate.toml"
    path.write_text('[upstream]\nbootstrap.servers = "localhost:1"\n')

    def running(*arguments: str) -> tuple[int, list[str], str]:
        target = f"{PARTITION.topic}:{PARTITION.partition}"
        code = cli.run(["tier", "cut", target, *arguments, "--config", str(path)])
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return running


@pytest.fixture(autouse=True)
async def tiered(bench: CommandBench) -> None:
    await bench.tiered(0)
    await bench.tiered(10)


def cuts(bench: CommandBench) -> list[tuple[int, int, bool]]:
    return [(each.leader_epoch, each.offset, each.is_proved) for each in bench.state.cuts(PARTITION)]


def test_without_yes_it_shows_what_becomes_void(bench: CommandBench, run: Run) -> None:
    code, out, err = run("5")
    assert (code, err, cuts(bench)) == (0, "Nothing was written. Use --yes to write.\n", [])
    shown = "the leader of epoch 3 has other records than the tier from offset 0 on, and shows no record before that"
    assert f"{NAME}: {shown}" in out
    assert out[-1].startswith(f"{NAME}: a CUT at offset 5 in leader epoch 3 voids 15 offsets in 2 segments with ")
    found = json.loads("".join(run("0", "--json")[1]))
    assert found["parting"] == {"offset": 0, "is_proved": False}
    assert (found["cuts"], found["void"]["offsets"]) == ([{"leader_epoch": 3, "offset": 0}], 20)
    assert (found["needed"], found["written"]) == (True, False)


def test_it_writes_once_and_then_finds_nothing_to_cut(bench: CommandBench, run: Run) -> None:
    code, _, err = run("0", "--yes")
    assert (code, err) == (
        0, "The CUT was written. The owner continues with this partition in its next round.\n",
    )  # fmt: skip
    assert cuts(bench) == [(3, 0, True)]
    code, _, err = run("0", "--yes")
    assert (code, err) == (0, f"{NAME}: nothing to cut from offset 0 on. Nothing was written.\n")


async def test_it_needs_no_ownership_and_ends_void_log_starts(bench: CommandBench, run: Run) -> None:
    await bench.rlmm.put_log_start(PARTITION, LogStart(4, 0, LogStartReason.USER))
    bench.rlmm.owned = False
    bounds = LocalLogBounds(0, 10, 10, 3)
    for each in cut.named_cuts(bench.state, PARTITION, bounds, 0, Parting(0, is_proved=False)):
        await bench.rlmm.put_named_cut(PARTITION, each.leader_epoch, each.offset)
    assert (cuts(bench), bench.state.log_starts(PARTITION)) == ([(3, 0, True)], [])


async def test_nothing_is_cut_while_the_leader_continues_the_tier(bench: CommandBench) -> None:
    """The first run of the command was in leader epoch 3. A clean election came since."""
    await bench.rlmm.put_named_cut(PARTITION, 3, 0)
    assert cut.named_cuts(bench.state, PARTITION, LocalLogBounds(0, 90, 90, 4), 0, None) == []


async def test_a_cut_that_was_not_proved_gets_the_offset(bench: CommandBench) -> None:
    """A CUT of the present leader epoch would void what was copied since."""
    await bench.rlmm.put_cut(PARTITION, 3, 15, is_proved=False)
    named = cut.named_cuts(bench.state, PARTITION, LocalLogBounds(15, 90, 90, 7), 12, None)
    assert [(each.leader_epoch, each.offset, each.is_proved) for each in named] == [(3, 12, True)]
    assert cut.void_records(bench.state, PARTITION, named).offsets == 3
    named = cut.named_cuts(bench.state, PARTITION, LocalLogBounds(15, 90, 90, 7), 15, None)
    assert cut.void_records(bench.state, PARTITION, named).offsets == 0


def test_a_leader_that_changes_before_the_write_is_an_error(
    bench: CommandBench, log: InMemoryLog, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, epochs = log.bounds, iter([3, 4])

    async def bounds(*arguments: Any) -> LocalLogBounds:
        log.leader_epoch = next(epochs)
        return await ask(*arguments)

    monkeypatch.setattr(log, "bounds", bounds)
    code, _, err = run("0", "--yes")
    assert (code, cuts(bench)) == (3, [])
    assert err == f"tidegate: {PARTITION.topic}:{PARTITION.partition} has another leader now: run the command again\n"
