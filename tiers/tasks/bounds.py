"""Checks the bounds between the tiers: Lz >= Ly >= Lx and Ly > Ry >= Rx.

See docs/founding.md, "Bounds"; docs/design.md, "Words".
"""

from __future__ import annotations

from typing import Final

from tiers.model.log_source import LocalLogBounds

BOUNDS: Final = ("Lz>=Ly", "Ly>=Lx", "Ly>Ry", "Ry>=Rx")


def violated_bounds(local: LocalLogBounds, remote_start: int | None, remote_end: int | None) -> list[str]:
    """Returns the names of the bounds that do not hold.

    Lz is the high watermark, since a copier cannot know more of the log end. `remote_end` is inclusive. Both remote
    offsets are None while the remote tier has no segment."""
    violated = []
    if local.high_watermark < local.last_stable_offset:
        violated.append("Lz>=Ly")
    if local.last_stable_offset < local.log_start_offset:
        violated.append("Ly>=Lx")
    if remote_start is not None and remote_end is not None:
        if local.last_stable_offset <= remote_end:
            violated.append("Ly>Ry")
        if remote_end < remote_start:
            violated.append("Ry>=Rx")
    return violated
