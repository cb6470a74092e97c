"""Finds the end offsets of remote leader epochs (docs/semantics.md 6.2).

This is the part of `LeaderEpochFileCache.endOffsetFor` that a broker cannot answer after it has trimmed its log.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from protocol.apis.fetch.response import EpochEndOffset
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import LeaderEpochEntry


def end_offset_for(
    epochs: Sequence[LeaderEpochEntry], epoch: int, gaps: Sequence[LogGap] = ()
) -> EpochEndOffset | None:
    """Returns where `epoch` ends, if it is older than the last remote epoch.

    None for the last remote epoch and later ones: only the broker knows where those end. `epochs` are ascending. The
    answer has the greatest known epoch that is not above `epoch`, and the offset at which its successor begins. If
    `epoch` is older than all known epochs, it ends where the first known epoch begins. If the successor begins in one
    of `gaps` or at the end of one, the lost records may have the requested epoch: that epoch then ends where the gap
    ends.
    """
    if not epochs or epoch >= epochs[-1].epoch:
        return None
    following = bisect_right(epochs, epoch, key=_epoch)
    end_offset = epochs[following].start_offset
    gap_end = max((gap.next_offset for gap in gaps if gap.first_offset <= end_offset <= gap.next_offset), default=None)
    if following == 0 or gap_end is not None:
        return EpochEndOffset(epoch, end_offset if gap_end is None else gap_end)
    return EpochEndOffset(epochs[following - 1].epoch, end_offset)


def contains(epochs: Sequence[LeaderEpochEntry], epoch: int) -> bool:
    place = bisect_left(epochs, epoch, key=_epoch)
    return place < len(epochs) and epochs[place].epoch == epoch


def _epoch(entry: LeaderEpochEntry) -> int:
    return entry.epoch
