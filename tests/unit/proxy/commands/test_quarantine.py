"""`tidegate tier quarantine`: its output, and that it writes nothing until the operator confirms twice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from proxy import cli
from proxy.commands.tier import quarantine as command
from proxy.commands.tier.quarantine import QuarantinedSegment, cut_segments
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers.segment_metadata import copied, segment
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogClampUpdate

WHOLE, PART, UNKNOWN = (str(UUID(int=number)) for number in (1, 2, 3))
FOUND = [
    QuarantinedSegment("orders", 0, PART, 50, 59, 1000, deletable=False, deletion_asked=False),
    QuarantinedSegment("orders", 0, WHOLE, 60, 99, 1000, deletable=True, deletion_asked=False),
]


class Operator:
    def __init__(self, config: Path) -> None:
        self.config = config
        self.asked: list[UUID] = []

    async def read(self, settings: object, wanted: Sequence[UUID]) -> list[QuarantinedSegment]:
        self.asked += wanted
        return FOUND

    def run(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["tier", "quarantine", *arguments, "--config", str(self.config)])
        return done.exit_code, done.output


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    config = tmp_path / "tidegate.toml"
    config.write_text('[upstream]\nbootstrap.servers = "127.0.0.1:1"\n')
    made = Operator(config)
    monkeypatch.setattr(command, "read_quarantine", made.read)
    return made


def test_the_list_is_for_people_and_for_programs(operator: Operator) -> None:
    code, out = operator.run("--json")
    assert (code, json.loads(out)) == (0, [asdict(each) for each in FOUND])
    code, out = operator.run()
    assert code == 0
    assert [line.split()[:4] for line in out.splitlines() if "orders" in line] == [
        ["orders-0", PART, "50", "59"],
        ["orders-0", WHOLE, "60", "99"],
    ]


def test_without_yes_nothing_is_written(operator: Operator) -> None:
    code, out = operator.run("delete", "--segment", WHOLE)
    assert (code, "Nothing was written" in out, operator.asked) == (0, True, [])
    code, _ = operator.run("delete", "--segment", WHOLE, "--yes")
    assert (code, operator.asked) == (0, [UUID(WHOLE)])


@pytest.mark.parametrize("refused", [PART, UNKNOWN])
def test_readable_and_unknown_segments_are_refused(operator: Operator, refused: str) -> None:
    code, out = operator.run("delete", "--segment", WHOLE, "--segment", refused, "--yes")
    assert (code, operator.asked) == (1, [])
    assert out == f"these segments are not in quarantine, or a part of them is still readable: {refused}\n"


async def test_every_segment_that_a_clamp_cut_is_found() -> None:
    metadata = InMemoryRemoteLogMetadataManager()
    partition = TopicIdPartition(UUID(int=7), 0, "orders")
    made = [await copied(metadata, segment(partition, start, start + 9)) for start in (0, 10, 20)]
    await metadata.put_remote_log_clamp(RemoteLogClampUpdate(partition, "", 0, 0, 14))
    assert [each.segment_id for each in cut_segments(metadata)] == [each.segment_id for each in made[1:]]
