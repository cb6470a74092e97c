"""The state on disk: the parts that a new process continues with, and those that it discards."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.tiers.metadata_state import IDENTITY, NOW_MS, PARTITION, Topic, fill, open_state, segment
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.serde import key_of
from tiers.metadata.state.layout import STATE_FILE, StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.log_start import OffsetAndEpoch


def test_a_restart_goes_on_where_the_last_process_stopped(tmp_path: Path) -> None:
    fill(tmp_path)
    state = open_state(tmp_path, is_kept=False)
    assert (state.next_offset(0), state.next_offset(1)) == (2, 0)
    assert state.remote_end_offset(PARTITION) == 99
    assert state.fresh_at_ms(0) is None
    state.close()


@pytest.mark.parametrize(
    "other",
    [
        replace(IDENTITY, cluster_id="another"),
        replace(IDENTITY, topic_id=UUID(int=98)),
        replace(IDENTITY, partition_count=51),
    ],
)
def test_a_foreign_state_is_thrown_away(tmp_path: Path, other: StateIdentity) -> None:
    fill(tmp_path)
    with closing(open_state(tmp_path, other)) as state:
        assert (state.next_offset(0), state.partitions(), state.identity()) == (0, [], other)


@pytest.mark.parametrize("kept", [0, 100, 4096, 20000, None])
def test_a_torn_file_is_thrown_away(tmp_path: Path, kept: int | None) -> None:
    fill(tmp_path)
    path = tmp_path / STATE_FILE
    path.write_bytes(b"not a database" * 4096 if kept is None else path.read_bytes()[:kept])
    with closing(open_state(tmp_path)) as state:
        assert (state.next_offset(0), state.partitions()) == (0, [])


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    with pytest.raises(RemoteLogMetadataError, match="another process"):
        open_state(tmp_path)
    state.close()
    open_state(tmp_path).close()


def test_a_folder_keeps_its_writers_name_unless_it_was_copied(tmp_path: Path) -> None:
    state = open_state(tmp_path)
    name = state.writer_name("host")
    state.close()
    state = open_state(tmp_path)
    assert state.writer_name("host") == name
    assert state.writer_name("other") != name
    state.close()


def test_a_new_start_keeps_the_keepers_name(state: RemoteLogMetadataStateWriter) -> None:
    name = state.writer_name("host")
    Topic(state).put(segment(1, 0, 9))
    state.mark_fresh({0: 4711})
    state.start_over("the metadata topic lost records")
    assert state.fresh_at_ms(0) is None
    assert state.writer() == name
    assert state.identity() == IDENTITY
    assert state.next_offset(0) == 0
    assert state.partitions() == []


def test_how_far_a_topic_was_read_is_kept_with_its_leader_epoch(tmp_path: Path) -> None:
    def read(end: int, leader_epoch: int) -> PartitionRead:
        one = segment(end, 0, 9)
        return PartitionRead(3, [MetadataEvent(end - 1, NOW_MS, key_of(one), one)], end, leader_epoch)

    state = open_state(tmp_path)
    assert state.consumed(3) == OffsetAndEpoch(0, -1)
    for end, leader_epoch, expected in ((5, 2, 2), (8, 4, 4), (9, -1, 4)):
        state.apply([read(end, leader_epoch)])
        assert state.consumed(3) == OffsetAndEpoch(end, expected)
    state.start_over("it is old")
    assert (state.consumed(3), state.reached(3)) == (OffsetAndEpoch(0, -1), OffsetAndEpoch(9, 4))
    state.apply([read(7, 2)])
    state.start_over("it is old again")
    assert state.reached(3) == OffsetAndEpoch(9, 4)
    state.close()


@pytest.mark.parametrize("other_schema", [False, True])
def test_that_a_topic_diverged_is_kept_for_that_topic(
    tmp_path: Path, other_schema: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path)
    state = open_state(tmp_path)
    state.mark_diverged(3, "it lost records")
    state.start_over("it contradicts itself")
    Topic(state).put(segment(1, 0, 9))
    state.close()
    if other_schema:
        monkeypatch.setattr("tiers.metadata.state.layout.SCHEMA_VERSION", 999)
    state = open_state(tmp_path)
    assert (state.diverged(), state.reached(0).offset) == ({3: "it lost records"}, 2)
    assert state.next_offset(0) == (0 if other_schema else 1)
    state.close()
    state = open_state(tmp_path, replace(IDENTITY, topic_id=UUID(int=98)))
    assert state.diverged() == {}
    state.close()
