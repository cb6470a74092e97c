"""`tidegate tier delete-missing`: its output, and that it writes nothing until the operator confirms twice."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict, replace
from uuid import UUID

import pytest

from proxy.commands.tier import delete_missing as command
from proxy.commands.tier.delete_missing import MissingTopic, missing_of
from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager
from tests.support.proxy.command_bench import Tidegate
from tests.support.tiers.segment_metadata import copied, segment
from tiers.model.ids import TopicIdPartition

SINCE_MS = 1_700_000_000_000
ORDERS, PAYMENTS, AGAIN = (str(UUID(int=number)) for number in (1, 2, 3))
ALONE = MissingTopic("orders", ORDERS, 1, 3, 3000, SINCE_MS, False)
PROVED = MissingTopic("payments", PAYMENTS, 2, 4, 4000, None, True)


class Operator:
    """Gives the command the missing topics, and records the ids that it deletes."""

    def __init__(self, tidegate: Tidegate) -> None:
        self.found = [ALONE, PROVED]
        self.deleted: list[UUID] = []
        self._tidegate = tidegate

    async def read(self, settings: object, deleted: Collection[UUID]) -> list[MissingTopic]:
        self.deleted += deleted
        return self.found

    def run(self, *arguments: str) -> tuple[int, str]:
        code, out, err = self._tidegate("tier", "delete-missing", *arguments)
        return code, out + err


@pytest.fixture
def operator(tidegate: Tidegate, monkeypatch: pytest.MonkeyPatch) -> Operator:
    made = Operator(tidegate)
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
    operator.found = [PROVED]
    assert operator.run()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "code", "deleted"),
    [
        (["orders", "--yes"], 0, [ORDERS]),
        ([ORDERS, "--yes"], 0, [ORDERS]),
        (["orders", PAYMENTS, "orders", "--yes"], 0, [ORDERS, PAYMENTS]),
        (["--older-than", "7d", "--yes"], 0, [ORDERS]),
        (["--older-than", "100000d", "--yes"], 0, []),
        (["orders"], 0, []),
        (["orders", AGAIN, "--yes"], 2, []),
        (["--yes"], 2, []),
        (["--older-than", "soon", "--yes"], 2, []),
        (["--older-than", "0s", "--yes"], 2, []),
    ],
)
def test_what_is_named_or_old_enough_is_deleted_with_yes(
    operator: Operator, arguments: list[str], code: int, deleted: list[str]
) -> None:
    operator.found = [ALONE, replace(PROVED, missing_since_ms=SINCE_MS)]
    answered, out = operator.run(*arguments)
    assert (answered, operator.deleted) == (code, [UUID(each) for each in deleted])
    assert ("Nothing was written" in out) == (code == 0 and not deleted)
    assert (f"{AGAIN} is not missing" in out) == (AGAIN in arguments)


def test_a_name_that_two_missing_topics_had_is_refused(operator: Operator) -> None:
    operator.found = [ALONE, replace(ALONE, topic_id=AGAIN)]
    code, out = operator.run("orders", "--yes")
    assert (code, operator.deleted, f"use an id: {ORDERS}, {AGAIN}" in out) == (2, [], True)
    assert operator.run(AGAIN, "--yes")[0] == 0


async def test_the_metadata_says_what_is_missing_of_which_topics() -> None:
    metadata = InMemoryRemoteLogMetadataManager(wall_clock_ms=lambda: SINCE_MS)
    orders, payments, again = (UUID(each) for each in (ORDERS, PAYMENTS, AGAIN))
    for number in (0, 1):
        await copied(metadata, segment(TopicIdPartition(orders, number, "orders"), 0, 9))
    await copied(metadata, segment(TopicIdPartition(again, 3, "orders"), 0, 9))
    await metadata.change_topic_tier_config(payments, "payments", {"remote.storage.enable": "true"})

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
