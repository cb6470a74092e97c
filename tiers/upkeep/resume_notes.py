"""Notes of the segments that a check found intact, in a file, so that an interrupted check is resumable.

The file has one line of JSON per segment; a line that a crash cut short does not count. `depth` is the thoroughness of
the check: a segment that was intact at some depth need not be checked again at that depth or a lower one.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import IO

from tiers.access.open_tier import RemoteTierError
from tiers.model.ids import RemoteLogSegmentId

_BEGIN = '\n{"partition": '


def noted_segments(path: Path | None, depth: int = 0) -> set[str]:
    """Returns the uuids of the segments that were noted at `depth` or more; an empty set without a file.

    Raises `RemoteTierError` when the file holds something else.
    """
    if path is None or not path.exists():
        return set()
    text = path.read_text(errors="replace")
    noted: dict[str, int] = {}
    for line in text.splitlines():
        with suppress(ValueError, KeyError, TypeError):
            note = json.loads(line)
            name = str(note["segment"])
            noted[name] = max(noted.get(name, 0), int(note.get("depth", 0)))
    is_cut_short = text.startswith(_BEGIN) or _BEGIN.startswith(text)
    if not noted and not is_cut_short:
        raise RemoteTierError(f"{path} was not written by this command: name another file")
    return {name for name, noted_depth in noted.items() if noted_depth >= depth}


def note_segment(notes: IO[str], segment_id: RemoteLogSegmentId, depth: int = 0) -> None:
    # The newline comes first, so that a line that was cut short does not damage the next one.
    line = {"partition": str(segment_id.topic_id_partition), "segment": str(segment_id.id), "depth": depth}
    notes.write(f"\n{json.dumps(line)}")
    notes.flush()
