from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from proxy import cli
from proxy.commands.tier import bounds as command
from proxy.commands.tier.bounds import PartitionBounds, partition_bounds
from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CommandBench
from tests.support.repository import ROOT
from tiers.model.log_start import LogGap, OffsetAndEpoch

EXAMPLE = ROOT / "docs" / "tidegate.example.toml"
HOLDS = PartitionBounds("orders", 0, 5, 0, 59, 60, 40, 100, 100)
VIOLATED = PartitionBounds("orders", 1, 0, 0, 120, 121, 40, 100, 100, violated=("Ly>Ry",))
UNKNOWN = PartitionBounds("a-topic-with-a-name-that-is-longer-than-most", 0, 0, 0, 9, 10, trouble="it was deleted")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tidegate.toml"
    path.write_text('[upstream]\nbootstrap.servers = "127.0.0.1:1"\n')
    return path


def run(
    monkeypatch: pytest.MonkeyPatch, config: Path, found: Sequence[PartitionBounds], *arguments: str
) -> tuple[int, str]:
    async def read_bounds(settings: object, topic: str | None) -> list[PartitionBounds]:
        return [each for each in found if topic in (None, each.topic)]

    monkeypatch.setattr(command, "read_bounds", read_bounds)
    result = CliRunner().invoke(cli.app, ["tier", "bounds", "--config", str(config), *arguments])
    assert result.stderr == ""
    return result.exit_code, result.stdout


def test_a_table_of_both_tiers(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    code, out = run(monkeypatch, config, [HOLDS])
    assert code == 0
    assert out.strip().splitlines()[-1].split() == ["orders-0", "5", "0", "59", "60", "40", "100", "100", "hold"]
    for heading in ("log start", "Rx first remote", "Ry last remote", "next local", "Lx first local", "Ly LSO"):
        assert heading in out


@pytest.mark.parametrize(("bad", "said"), [(VIOLATED, "violated: Ly>Ry"), (UNKNOWN, "it was deleted")])
def test_a_violated_bound_is_named_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, config: Path, bad: PartitionBounds, said: str
) -> None:
    code, out = run(monkeypatch, config, [HOLDS, bad])
    assert code == 1
    assert said in out
    assert f"{bad.topic}-{bad.partition}" in out


def test_offsets_in_neither_tier_are_named(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    found = [replace(HOLDS, gaps=(LogGap(10, 20),), unknown=(LogGap(30, 40), LogGap(60, 65)))]
    code, out = run(monkeypatch, config, found)
    assert (code, out.splitlines()[-3:]) == (
        0,
        [
            "orders-0: gap: the brokers removed the offsets 10 to 19 before they were copied",
            "orders-0: neither tier has the offsets 30 to 39",
            "orders-0: neither tier has the offsets 60 to 64",
        ],
    )
    _, out = run(monkeypatch, config, found, "--json")
    [line] = json.loads(out)
    assert line["gaps"] == [{"first_offset": 10, "next_offset": 20}]
    assert line["unknown"] == [{"first_offset": 30, "next_offset": 40}, {"first_offset": 60, "next_offset": 65}]


@pytest.mark.parametrize(
    ("segments", "trim", "local_log_start", "unknown"),
    [
        ((0, 10), 15, 15, []),
        ((0, 20), 15, 35, [(10, 20), (30, 35)]),
        ((20,), 20, 25, [(0, 20)]),
        ((20, 40), 20, 55, [(0, 20), (30, 40), (50, 55)]),
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


def test_json_is_for_programs(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    code, out = run(monkeypatch, config, [HOLDS, UNKNOWN], "orders", "--json")
    assert code == 0
    [line] = json.loads(out)
    assert (line["remote_end"], line["next_local_offset"], line["holds"], line["trouble"]) == (59, 60, True, None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tier", "bounds"], "there is no configuration: name a file with --config"),
        (["tier", "bounds", "--config", "/nowhere/x.toml"], "/nowhere/x.toml: No such file or directory"),
        (["tier", "bounds", "a:0", "--config", str(EXAMPLE)], "expected TOPIC without a partition, not 'a:0'"),
        (["tier", "pause", "a:0", "--config", str(EXAMPLE)], "expected TOPIC without a partition, not 'a:0'"),
    ],
)
def test_misuse_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


def test_a_cluster_that_does_not_answer_is_one_line_and_exit_code_3(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["tier", "bounds", "--config", str(config)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("tidegate: no broker answers at 127.0.0.1:1: ")
    assert len(captured.err.splitlines()) == 1
