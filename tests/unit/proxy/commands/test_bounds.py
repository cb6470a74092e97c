from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy import cli
from proxy.commands.tier import bounds as command
from proxy.commands.tier.bounds import PartitionBounds, partition_bounds
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CommandBench, Tidegate
from tiers.model.log_start import LogGap, OffsetAndEpoch

HOLDS = PartitionBounds("orders", 0, 5, 0, 59, 60, 40, 100, 100)
LOST = replace(HOLDS, partition=1, gaps=(LogGap(10, 20),), unknown=(LogGap(30, 40), LogGap(60, 65)))
VIOLATED = PartitionBounds("orders", 2, 0, 0, 120, 121, 40, 100, 100, violated=("Ly>Ry",))
UNKNOWN = PartitionBounds("a-topic-with-a-name-that-is-longer-than-most", 0, 0, 0, 9, 10, trouble="it was deleted")


def test_a_table_for_people_and_json_for_programs(tidegate: Tidegate, monkeypatch: pytest.MonkeyPatch) -> None:
    async def read_bounds(settings: object, topic: str | None) -> list[PartitionBounds]:
        return [each for each in shown if topic in (None, each.topic)]

    monkeypatch.setattr(command, "read_bounds", read_bounds)
    shown = [HOLDS, LOST]
    code, out, err = tidegate("tier", "bounds")
    assert (code, err) == (0, "")
    for heading in ("log start", "Rx first remote", "Ry last remote", "next local", "Lx first local", "Ly LSO"):
        assert heading in out
    assert ["orders-0", "5", "0", "59", "60", "40", "100", "100", "hold"] in [line.split() for line in out.splitlines()]
    assert out.splitlines()[-3:] == [
        "orders-1: gap: the brokers removed the offsets 10 to 19 before they were copied",
        "orders-1: neither tier has the offsets 30 to 39",
        "orders-1: neither tier has the offsets 60 to 64",
    ]
    for bad, said in ((VIOLATED, "violated: Ly>Ry"), (UNKNOWN, "it was deleted")):
        shown = [HOLDS, LOST, bad]
        code, out, _ = tidegate("tier", "bounds")
        assert (code, said in out, f"{bad.topic}-{bad.partition}" in out) == (1, True, True)
    code, out, _ = tidegate("tier", "bounds", "orders", "--json")
    one, lost = json.loads(out)
    assert (code, one["remote_end"], one["next_local_offset"], one["holds"], one["trouble"]) == (0, 59, 60, True, None)
    assert lost["gaps"] == [{"first_offset": 10, "next_offset": 20}]
    assert lost["unknown"] == [{"first_offset": 30, "next_offset": 40}, {"first_offset": 60, "next_offset": 65}]


@pytest.mark.parametrize(
    ("segments", "trim", "local_log_start", "unknown"),
    [
        ((0, 10), 15, 15, []),
        ((0, 20), 15, 35, [(10, 20), (30, 35)]),
        ((20,), 20, 25, [(0, 20)]),
        ((), 20, 25, [(0, 25)]),
        ((), None, 25, []),
    ],
)
async def test_offsets_in_neither_tier_are_found(
    bench: CommandBench, segments: Sequence[int], trim: int | None, local_log_start: int, unknown: list[tuple[int, int]]
) -> None:
    for start in segments:
        await bench.tiered(start)
    if trim is not None:
        await bench.rlmm.put_local_log_start(PARTITION, OffsetAndEpoch(trim, 0))
    source = cast(Any, InMemoryLog(batch_of(50, 20), log_start_offset=local_log_start))
    cluster = cast(Any, SimpleNamespace(topics_by_id={PARTITION.topic_id: PARTITION.topic}))
    found = await partition_bounds(source, cluster, bench.state, PARTITION)
    assert (found.unknown, found.trouble) == (tuple(unknown), None)


async def test_a_deleted_topic_has_its_remote_bounds(bench: CommandBench) -> None:
    await bench.tiered(0)
    gone = cast(Any, SimpleNamespace(topics_by_id={}))
    found = await partition_bounds(cast(Any, InMemoryLog()), gone, bench.state, PARTITION)
    assert (found.trouble, found.remote_end, found.holds) == ("the topic was deleted", 9, False)


def test_misuse_and_a_silent_cluster_are_one_line(tidegate: Tidegate, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("bounds", "pause"):
        code, out, err = tidegate("tier", name, "a:0")
        assert (code, out, len(err.splitlines())) == (2, "", 1)
        assert "expected TOPIC without a partition, not 'a:0'" in err
    code, out, err = tidegate("tier", "bounds")
    assert (code, out, len(err.splitlines())) == (3, "", 1)
    assert err.startswith("tidegate: no broker answers at 127.0.0.1:1: ")
    assert cli.run(["tier", "bounds"]) == 2
    assert "there is no configuration: name a file with --config" in capsys.readouterr().err
