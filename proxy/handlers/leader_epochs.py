"""Where remote epochs end: the half of `LeaderEpochFileCache.endOffsetFor` that brokers forget (semantics 6.2)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from protocol.apis.fetch_response import EpochEndOffset
from tiers.model.segment_metadata import LeaderEpochEntry


def end_offset_for(epochs: Sequence[LeaderEpochEntry], epoch: int) -> EpochEndOffset | None:
    """For an epoch older than the last remote one; None from that one on: only the broker knows where those end.

    `epochs` are ascending. The answer is the greatest known epoch not above the asked one, and where its successor
    begins; an epoch older than all begins, and so ends, where the first one begins.
    """
    if not epochs or epoch >= epochs[-1].epoch:
        return None
    following = bisect_right(epochs, epoch, key=_epoch)
    if following == 0:
        return EpochEndOffset(epoch, epochs[0].start_offset)
    return EpochEndOffset(epochs[following - 1].epoch, epochs[following].start_offset)


def contains(epochs: Sequence[LeaderEpochEntry], epoch: int) -> bool:
    place = bisect_left(epochs, epoch, key=_epoch)
    return place < len(epochs) and epochs[place].epoch == epoch


def _epoch(entry: LeaderEpochEntry) -> int:
    return entry.epoch
