"""The bounds that must hold between the tiers: Lz >= Ly >= Lx and Ly > Ry >= Rx (founding documents; DESIGN, Words)."""

from __future__ import annotations

from tiers.log.log_source import LocalLogBounds


def violated_bounds(local: LocalLogBounds, remote_start: int | None, remote_end: int | None) -> list[str]:
    """Names of the bounds that do not hold. Lz is the high watermark, for that is what a copier may know of the end.

    `remote_end` is inclusive; both are None while nothing is remote."""
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
