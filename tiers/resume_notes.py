"""A file of the segments that were found whole: a check that was interrupted goes on where it ended.

A line for each, JSON; one that a crash cut short counts for nothing. `depth` says how thoroughly it was looked at: what
was found whole at some depth need not be looked at again at that depth or a lesser one.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import IO

from tiers.model.ids import RemoteLogSegmentId
from tiers.open_tier import RemoteTierError


def noted_segments(path: Path | None, depth: int = 0) -> set[str]:
    """The uuids of those that were noted at `depth` or more. Raises `RemoteTierError` for a file of something else."""
    if path is None or not path.exists():
        return set()
    lines = path.read_text(errors="replace").splitlines()
    noted: dict[str, int] = {}
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            note = json.loads(line)
            name = str(note["segment"])
            noted[name] = max(noted.get(name, 0), int(note.get("depth", 0)))
    if lines and not noted:
        raise RemoteTierError(f"{path} was not written by this command")
    return {name for name, noted_depth in noted.items() if noted_depth >= depth}


def note_segment(notes: IO[str], segment_id: RemoteLogSegmentId, depth: int = 0) -> None:
    # In front of it, so that a line that was cut short takes no other with it.
    line = {"partition": str(segment_id.topic_id_partition), "segment": str(segment_id.id), "depth": depth}
    notes.write(f"\n{json.dumps(line)}")
    notes.flush()
