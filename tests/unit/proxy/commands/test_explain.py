"""The texts of `tidegate explain`, and its mistakes on the command line."""

from __future__ import annotations

from uuid import UUID

import pytest
import typer

from protocol.apis.metadata import PartitionMetadata
from proxy.commands.explain import Explained, _partitions, lines_of
from tests.support.proxy.command_bench import Tidegate
from tests.support.tiers.workbench import POLICY
from tiers.broker.cluster_metadata import ClusterMetadata, TopicMetadata
from tiers.explain.answers import (
    OffsetAnswer,
    PartitionAnswer,
    Place,
    Question,
    SegmentAnswer,
    StateReason,
    UncopiedAnswer,
    Why,
)
from tiers.explain.words import why, why_held
from tiers.tasks.hold import Hold, HoldReason

T_MS = 1_700_000_000_000
NEWEST = why_held(Question.ON_BROKER, Hold(HoldReason.NEWEST_SEGMENT), POLICY)
KEPT = why_held(
    Question.NOT_EXPIRED,
    Hold(HoldReason.TOTAL_RETENTION, T_MS, {"age_ms": 3_600_000, "retention_ms": 7_200_000}),
    POLICY,
)


def segment(start: int, place: Place, *whys: Why) -> SegmentAnswer:
    return SegmentAnswer(
        f"id-{start}", start, start + 9, 100, "COPY_SEGMENT_FINISHED", place, f"key-{start}", T_MS, (3,), whys
    )


def partition(*segments: SegmentAnswer, uncopied: UncopiedAnswer | None = None) -> PartitionAnswer:
    rest = uncopied or UncopiedAnswer(30, 30, ())
    return PartitionAnswer("orders", 0, 0, 0, 29, 20, 30, 30, "10.0.0.7 (tidegate-1)", (), segments, rest)


def test_segments_of_one_kind_are_one_paragraph() -> None:
    open_transaction = why(Question.NOT_REMOTE, StateReason.OPEN_TRANSACTION, "A transaction is open.")
    answer = partition(
        segment(0, Place.REMOTE, KEPT),
        segment(10, Place.REMOTE, KEPT),
        segment(20, Place.BOTH, NEWEST, KEPT),
        uncopied=UncopiedAnswer(30, 35, (open_transaction,)),
    )
    kept = (
        " The total retention covers the segment. It expires when its newest record is 2 h old"
        " (retention.ms); it is 1 h old now."
        " This reason ends at the latest at 2023-11-14T22:13:20+00:00. See docs/design.md, 'Log range'."
    )
    assert list(lines_of(Explained(answer))) == [
        "orders:0",
        "  The log starts at offset 0. The remote tier has the offsets 0 to 29. The broker has the offsets 20 to 29.",
        "  The owner is 10.0.0.7 (tidegate-1).",
        "  Offsets 0 to 19: 2 segments, 200 B, in the remote tier.",
        f"    Why not yet expired, for the first of them:{kept}",
        "  Offsets 20 to 29: segment id-20, 100 B, in both tiers.",
        "    Why still on the broker: The newest copied segment always stays on the broker."
        " See docs/design.md, safety rule 4 (Trim only as the owner, and only the log that was compared).",
        f"    Why not yet expired:{kept}",
        "  Offsets 30 to 34: on the broker alone.",
        "    Why not yet remote: A transaction is open. See docs/design.md, 'Log range'.",
    ]


def test_one_offset_tells_the_object() -> None:
    found = OffsetAnswer(3, Place.REMOTE, "The remote tier has offset 3.", segment(0, Place.REMOTE), whys=(KEPT,))
    lines = list(lines_of(Explained(partition(), found, "The first record of then has offset 3.")))
    assert lines[:5] == [
        "orders:0",
        "  The first record of then has offset 3.",
        "  The remote tier has offset 3.",
        "  Segment: offsets 0 to 9, 100 B, leader epochs 3, newest record 2023-11-14T22:13:20+00:00.",
        "  Object: key-0",
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["orders", "--offset", "-1"], "Input should be greater than or equal to 0"),
        (["orders", "--offset", "1", "--time", "2"], "use --offset or --time, not both"),
        (["orders", "--time", "yesterday"], "expected a time such as 2026-11-26T14:00:00Z"),
        (["orders", f"--time={2**63}"], "expected a time such as 2026-11-26T14:00:00Z"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_line(arguments: list[str], said: str, tidegate: Tidegate) -> None:
    code, out, err = tidegate("explain", *arguments)
    assert (code, out, len(err.splitlines()), said in err) == (2, "", 1, True)


def test_an_offset_needs_a_partition_unless_the_topic_has_one() -> None:
    partitions = {number: PartitionMetadata(number, 1, 0) for number in range(2)}
    two = TopicMetadata("orders", UUID(int=1), partitions)
    cluster = ClusterMetadata("c", 1, {}, {"orders": two}, 0, {})
    with pytest.raises(typer.BadParameter, match="orders has 2 partitions: name one, such as orders:0"):
        _partitions(cluster, "orders", None, needs_one=True)
    assert len(_partitions(cluster, "orders", None, needs_one=False)) == 2
    assert len(_partitions(cluster, "orders", 1, needs_one=True)) == 1
