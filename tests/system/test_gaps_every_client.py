"""Every client reads a real log across a gap: the remote tier, the gap, and the records behind it in either tier."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.clients.all_clients import POSITIONED, READERS
from tests.support.clients.client import READ_COMMITTED, READ_UNCOMMITTED
from tests.support.rigs.gapped_logs import REMOVALS, GappedLog, GappedLogs, gapped_logs
from tests.support.rigs.loss_rig import alarms, leader_behind, lines_about
from tests.support.rigs.transaction_reference import check_every_start
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import topic_id_of
from tests.support.servers.producing import produce

pytestmark = pytest.mark.integration

ISOLATIONS = (READ_UNCOMMITTED, READ_COMMITTED)
BEHIND = {
    "deleted": ["remote", "local"],
    "before-local": ["local"],
    "to-the-end": [],
}
"""The tiers that have the records behind the gap, by the name of the log."""


@pytest.fixture(scope="module")
def gapped(kafka: KafkaCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GappedLogs]:
    with gapped_logs(kafka, tmp_path_factory.mktemp("gaps")) as made:
        yield made


@pytest.fixture
def log(request: pytest.FixtureRequest, gapped: GappedLogs) -> GappedLog:
    return gapped.logs[request.param]


def tiers_of(log: GappedLog, remote_end: int) -> list[str]:
    """Returns the tiers with the records behind the gap. The newest segment is in both tiers."""
    gap_end, local_start = log.gap.next_offset, log.local_log_start()
    tiers = [("remote", gap_end <= remote_end), ("local", max(gap_end, remote_end + 1) < log.end)]
    assert local_start > gap_end or remote_end < gap_end == local_start
    return [tier for tier, is_there in tiers if is_there]


@pytest.mark.parametrize("log", REMOVALS, indirect=True)
def test_the_gap_raises_one_alarm(gapped: GappedLogs, log: GappedLog) -> None:
    bounds = gapped.site.bounds(log.topic)
    assert bounds["gaps"] == [{"first_offset": log.gap.first_offset, "next_offset": log.gap.next_offset}]
    assert (bounds["log_start_offset"], bounds["holds"]) == (0, True)
    assert tiers_of(log, bounds["remote_end"]) == BEHIND[log.topic.removeprefix(f"{gapped.site.topic}-")]
    offsets = gapped.proxy.metric("tidegate_remote_log_gap_offsets", topic=log.topic, partition="0")
    assert offsets == log.gap.next_offset - log.gap.first_offset
    assert (alarms(gapped.proxy, log.topic, "gap"), alarms(gapped.proxy, log.topic)) == (1, 1)
    assert len(lines_about(gapped.proxy, log.topic, "the log has a gap")) == 1


@pytest.mark.parametrize("log", REMOVALS, indirect=True)
def test_the_gap_swallowed_markers(log: GappedLog) -> None:
    """One aborted transaction ended in the gap, and another one began there. Each side also has one of its own."""
    aborting, gap = log.history.reference.aborting, log.gap
    lost = [marker for marker in aborting if gap.first_offset <= marker < gap.next_offset]
    assert any(aborting[marker] < gap.first_offset for marker in lost)
    assert any(marker < gap.first_offset for marker in aborting)
    if gap.next_offset < log.end:
        behind = {marker: first for marker, first in aborting.items() if marker >= gap.next_offset}
        assert any(first < gap.next_offset for first in behind.values())
        assert any(first >= gap.next_offset for first in behind.values())


@pytest.mark.parametrize("log", REMOVALS, indirect=True)
def test_every_answer_hides_what_was_aborted(gapped: GappedLogs, log: GappedLog) -> None:
    reference, gap = log.reference, log.gap
    some = reference._replace(batches=reference.batches[:: 1 + len(reference.batches) // 100])
    inside = [*range(gap.first_offset, gap.next_offset, 14), *({gap.next_offset} - {log.end})]
    topic_id = topic_id_of(gapped.site.cluster.bootstrap_servers, log.topic)
    check_every_start(leader_behind(gapped.proxy), log.topic, topic_id, some, inside)


@pytest.mark.parametrize("log", REMOVALS, indirect=True)
@pytest.mark.parametrize("name", READERS)
def test_it_reads_both_sides(gapped: GappedLogs, log: GappedLog, name: str) -> None:
    for isolation in ISOLATIONS:
        expected = log.expected(name, isolation)
        found = READERS[name].read(gapped.bootstrap, log.topic, 0, len(expected), isolation)
        assert log.found(found) == expected, isolation


@pytest.mark.parametrize("log", REMOVALS, indirect=True)
@pytest.mark.parametrize("name", POSITIONED)
def test_it_reads_on_from_inside_the_gap_to_the_end(gapped: GappedLogs, log: GappedLog, name: str) -> None:
    middle = (log.gap.first_offset + log.gap.next_offset) // 2
    for isolation in ISOLATIONS:
        found = POSITIONED[name].read_to(gapped.bootstrap, log.topic, middle, log.end, isolation)
        assert log.found(found) == log.expected(name, isolation, middle), isolation


@pytest.mark.parametrize("log", ["to-the-end"], indirect=True)
def test_it_reads_what_comes_behind_a_gap_at_the_end(gapped: GappedLogs, log: GappedLog) -> None:
    """This test is the last one of the file: it changes the log."""
    new = [(log.end + number, f"new-{number}".encode()) for number in range(2)]
    produce(gapped.site.cluster.bootstrap_servers, log.topic, [value for _, value in new])
    for name in READERS:
        expected = log.expected(name, READ_COMMITTED) + new
        found = READERS[name].read(gapped.bootstrap, log.topic, 0, len(expected), READ_COMMITTED)
        assert log.found(found) == expected, name
