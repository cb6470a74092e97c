"""`tidegate tier delete-missing`: its output, and that it writes nothing until the operator confirms twice."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from uuid import UUID

import pytest
from typer.testing import CliRunner

from proxy import cli
from proxy.commands.tier import delete_missing as command
from proxy.commands.tier.delete_missing import MissingTopic, missing_of
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.tiers.segment_metadata import copied, segment
from tiers.model.ids import TopicIdPartition

SINCE_MS = 1_700_000_000_000
ORDERS, PAYMENTS, AGAIN = (str(UUID(int=number)) for number in (1, 2, 3))
ALONE = MissingTopic("orders", ORDERS, 1, 3, 3000, SINCE_MS, False)
PROVED = MissingTopic("payments", PAYMENTS, 2, 4, 4000, None, True)


class Operator:
    def __init__(self, config: Path) -> None:
        self.config = config
        self.found = [ALONE, PROVED]
        self.deleted: list[UUID] = []

    async def read(self, settings: object, deleted: Collection[UUID]) -> list[MissingTopic]:
        self.deleted += deleted
        return self.found

    def run(self, *arguments: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli.app, ["tier", "delete-missing", *arguments, "--config", str(self.config)])
        return done.exit_code, done.output


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Operator:
    config = tmp_path / "tidegate.toml"
    config.write_text('[upstream]\nbootstrap.servers = "127.0.0.1:1"\n')
    made = Operator(config)
    monkeypatch.setattr(command, "read_missing_topics", made.read)
    return made


def test_the_list_is_for_people_and_for_programs(operator: Operator) -> None:
    code, out = operator.run("--json")
    assert (code, json.loads(out)) == (1, [asdict(each) for each in operator.found])
    code, out = operator.run()
    assert code == 1
    first, second = (line for line in out.splitlines() if "orders" in line or "payments" in line)
    assert first.split()[:5] == ["orders", ORDERS, "1", "3", "3000"]
    assert "2023-11-14T22:13:20" in first
    assert "not proved: an operator must decide" in first
    assert second.split() == ["payments", PAYMENTS, "2", "4", "4000", "-", "proved"]


def test_proved_deletions_alone_are_no_finding(operator: Operator) -> None:
    operator.found = [PROVED]
    assert operator.run()[0] == 0


@pytest.mark.parametrize(("age", "deleted"), [("7d", [UUID(ORDERS)]), ("100000d", [])])
def test_topics_are_chosen_by_the_time_since_which_they_are_missing(
    operator: Operator, age: str, deleted: list[UUID]
) -> None:
    operator.found = [ALONE, replace(PROVED, missing_since_ms=SINCE_MS)]
    code, out = operator.run("--older-than", age, "--yes")
    assert (code, operator.deleted) == (0, deleted)
    assert out.count("was written") == 1
    assert ("Nothing was written" in out) == (not deleted)


@pytest.mark.parametrize("arguments", [[], ["--older-than", "soon"], ["--older-than", "-1"], ["--older-than", "0s"]])
def test_a_deletion_needs_topics_or_an_age(operator: Operator, arguments: list[str]) -> None:
    assert operator.run(*arguments, "--yes")[0] == 2
    assert operator.deleted == []


@pytest.mark.parametrize("named", ["orders", ORDERS])
def test_without_yes_nothing_is_written(operator: Operator, named: str) -> None:
    code, out = operator.run(named)
    assert (code, "Nothing was written" in out, operator.deleted) == (0, True, [])
    code, _ = operator.run(named, "--yes")
    assert (code, operator.deleted) == (0, [UUID(ORDERS)])


def test_several_topics_are_named_at_once(operator: Operator) -> None:
    code, _ = operator.run("orders", PAYMENTS, "orders", "--yes")
    assert (code, operator.deleted) == (0, [UUID(ORDERS), UUID(PAYMENTS)])


def test_a_topic_that_is_not_missing_is_refused(operator: Operator) -> None:
    code, out = operator.run("orders", AGAIN, "--yes")
    assert (code, operator.deleted) == (1, [])
    assert out == f"{AGAIN} is not missing: a broker knows it, or the remote tier has nothing of it\n"


def test_a_name_that_two_missing_topics_had_is_refused(operator: Operator) -> None:
    operator.found = [ALONE, replace(ALONE, topic_id=AGAIN)]
    code, out = operator.run("orders", "--yes")
    assert (code, operator.deleted) == (1, [])
    assert out == f"orders is the name of several missing topics; use an id: {ORDERS}, {AGAIN}\n"
    assert operator.run(AGAIN, "--yes")[0] == 0


async def test_the_metadata_says_what_is_missing_of_which_topics() -> None:
    metadata = InMemoryRemoteLogMetadataManager(wall_clock_ms=lambda: SINCE_MS)
    orders, payments, again = (UUID(each) for each in (ORDERS, PAYMENTS, AGAIN))
    for number in (0, 1):
        await copied(metadata, segment(TopicIdPartition(orders, number, "orders"), 0, 9))
    await copied(metadata, segment(TopicIdPartition(again, 3, "orders"), 0, 9))
    settings = {"remote.storage.enable": "true"}
    await metadata.change_topic_tier_config(payments, "payments", settings)

    def seen(*gone: UUID) -> list[tuple[str, int, int, int | None, bool]]:
        return [
            (each.topic_id, each.partitions, each.size_bytes, each.missing_since_ms, each.deletion_proved)
            for each in missing_of(metadata.state, gone)
        ]

    assert seen() == []
    assert seen(orders) == [(ORDERS, 2, 2000, None, False)]
    await metadata.put_topic_missing(orders, "orders", is_missing=True)
    await metadata.put_topic_deletion(payments, "payments", is_confirmed=True)
    assert seen(again, payments, orders) == [
        (ORDERS, 2, 2000, SINCE_MS, False),
        (AGAIN, 1, 1000, None, False),
        (PAYMENTS, 0, 0, None, True),
    ]
