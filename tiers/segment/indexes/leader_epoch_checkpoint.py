"""Encodes and decodes `leader-epoch-checkpoint`, Kafka's text file of leader epochs and offsets (docs/semantics.md 10).

    0                 version
    2                 number of entries
    0 0               epoch, start offset
    3 1500

A segment carries every entry up to its end, including those of earlier segments (docs/semantics.md 6.5).
"""

from __future__ import annotations

from itertools import pairwise

from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import LeaderEpochEntry

_VERSION = 0


def encode_leader_epoch_checkpoint(entries: tuple[LeaderEpochEntry, ...]) -> bytes:
    lines = [str(_VERSION), str(len(entries)), *(f"{entry.epoch} {entry.start_offset}" for entry in entries)]
    return ("\n".join(lines) + "\n").encode()


def decode_leader_epoch_checkpoint(data: bytes | memoryview) -> tuple[LeaderEpochEntry, ...]:
    """Decodes the file. Raises `CorruptSegmentError` unless the entries ascend and have the announced number."""
    try:
        version, count, *lines = str(data, "ascii").splitlines()
        if int(version) != _VERSION:
            raise CorruptSegmentError(f"leader-epoch checkpoint: version {version} is not supported")
        pairs = [(int(epoch), int(offset)) for epoch, offset in (line.split(" ") for line in lines)]
        announced = int(count)
    except ValueError as error:
        raise CorruptSegmentError(f"leader-epoch checkpoint: {error}") from error
    if len(pairs) != announced:
        raise CorruptSegmentError(f"leader-epoch checkpoint: {len(pairs)} entries, but {announced} are announced")
    entries = tuple(LeaderEpochEntry(epoch, offset) for epoch, offset in pairs)
    for previous, entry in pairwise(entries):
        if entry.epoch <= previous.epoch or entry.start_offset < previous.start_offset:
            raise CorruptSegmentError(f"leader-epoch checkpoint: {entry} follows {previous}")
    return entries
