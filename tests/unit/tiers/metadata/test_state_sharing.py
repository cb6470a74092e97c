"""The state in other processes: each transaction is visible when it ends, and nothing before it."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.tiers.metadata_state import IDENTITY, Topic, fill, open_state, segment, to
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.state.layout import STATE_FILE, StateIdentity
from tiers.metadata.state.state import RemoteLogMetadataState, StateFiles
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter, forget_freshness, saved_identity
from tiers.model.segment_metadata import RemoteLogSegmentState as State

_DYING_READER = """
import os, signal, sys
from pathlib import Path
from tiers.metadata.state.state import RemoteLogMetadataState, StateFiles

state = RemoteLogMetadataState(StateFiles.open_shared(Path(sys.argv[1])))
transaction = state._env.begin()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_reader_that_died_is_forgotten(tmp_path: Path) -> None:
    fill(tmp_path)
    state = open_state(tmp_path)
    before = state._env.readers()
    died = subprocess.run([sys.executable, "-c", _DYING_READER, str(tmp_path)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert state._env.readers() != before
    state.mark_read_to_end({0: 0})
    assert state._env.readers() == before
    state.close()


def test_old_freshness_is_forgotten_before_the_first_read(tmp_path: Path) -> None:
    fill(tmp_path)
    state = open_state(tmp_path)
    state.mark_fresh({0: 4711})
    with pytest.raises(RemoteLogMetadataError, match="another process"):
        forget_freshness(tmp_path)
    state.close()
    shared = RemoteLogMetadataState(StateFiles.open_shared(tmp_path))
    assert shared.fresh_at_ms(0) == 4711
    shared.close()
    forget_freshness(tmp_path)
    with pytest.raises(RemoteLogMetadataNotReadyError):
        RemoteLogMetadataState(StateFiles.open_shared(tmp_path))


def test_a_saved_state_has_an_identity_while_it_has_segments(tmp_path: Path) -> None:
    assert saved_identity(tmp_path) is None
    open_state(tmp_path).close()
    assert saved_identity(tmp_path) is None, "it names no segment"
    fill(tmp_path)
    assert saved_identity(tmp_path) == IDENTITY
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:8192])
    assert saved_identity(tmp_path) is None, "it is torn"
    path.write_bytes(b"nothing of the kind")
    assert saved_identity(tmp_path) is None


def test_freshness_goes_before_a_foreign_state_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the other processes would take an empty state for the whole one."""
    fill(tmp_path)
    state = open_state(tmp_path)
    state.mark_fresh({0: 4711})
    state.close()
    seen: list[int | None] = []
    start_over = RemoteLogMetadataStateWriter.start_over

    def look_and_start_over(writer: RemoteLogMetadataStateWriter, reason: str, *, is_same_topic: bool) -> None:
        seen.append(writer.fresh_at_ms(0))
        start_over(writer, reason, is_same_topic=is_same_topic)

    monkeypatch.setattr(RemoteLogMetadataStateWriter, "start_over", look_and_start_over)
    other = StateIdentity("another cluster", UUID(int=9), 1)
    RemoteLogMetadataStateWriter.open(tmp_path, other).close()
    assert seen == [None]


def test_another_reading_begins_with_each_clearing_and_opening(tmp_path: Path) -> None:
    fill(tmp_path)
    state = open_state(tmp_path)
    first = state.reading()
    state.mark_fresh({0: 4711})
    assert state.reading() == first
    state.start_over_partitions([0], "too old", 0)
    second = state.reading()
    state.start_over("too old")
    third = state.reading()
    state.close()
    shared = RemoteLogMetadataState(StateFiles.open_shared(tmp_path))
    assert shared.reading() == third
    shared.close()
    again = open_state(tmp_path)
    assert len({first, second, third, again.reading()}) == 4
    again.close()


_READER = """
import sys
from pathlib import Path
from uuid import UUID
from tiers.metadata.shared_metadata import SharedMetadata
from tiers.model.ids import TopicIdPartition

state = SharedMetadata(Path(sys.argv[1])).state
for _ in sys.stdin:
    assert state.reopen_if_replaced()
    print(state.remote_end_offset(TopicIdPartition(UUID(int=7), 3)), state.fresh_at_ms(0), flush=True)
"""


def test_other_processes_see_each_transaction_and_each_new_state(tmp_path: Path) -> None:
    fill(tmp_path)
    command = [sys.executable, "-c", _READER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:

        def ask() -> str:
            assert reader.stdin is not None
            assert reader.stdout is not None
            print(file=reader.stdin, flush=True)
            return reader.stdout.readline().strip()

        for is_replaced in (False, True):
            if is_replaced:
                (tmp_path / STATE_FILE).unlink()
                fill(tmp_path)
            with closing(open_state(tmp_path)) as state:
                topic = Topic(state)
                topic.next_offset = state.next_offset(0)
                assert ask().split()[0] == "99"
                second = segment(2, 100, 199)
                topic.put(second, to(second, State.COPY_SEGMENT_FINISHED))
                state.mark_fresh({0: 4711})
                assert ask() == "199 4711"
