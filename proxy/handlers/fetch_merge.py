"""Merging two tiers into one Fetch answer: byte budgets, min-one-message and the broker's own bytes (semantics 3.6).

* A remote partition's budget is reserved in request order out of the request's MaxBytes; the broker gets the rest.
* min-one-message (KIP-74): the first partition that has bytes may exceed every limit by its first batch; whatever after
  it does not fit any more is left out, as on one broker. Both tiers let the first of theirs through, for neither knows
  of the other. By request order alone, since clients rotate it: each partition becomes the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.apis.fetch_encoding import encode_partition
from protocol.apis.fetch_request import FetchPartition
from protocol.apis.fetch_response import (
    AbortedTransaction,
    EpochEndOffset,
    FetchResponse,
    rebuild_response,
    without_records,
)
from protocol.errors import ErrorCode
from protocol.primitives import Buffer
from protocol.splice import Splice
from proxy.local_log_bounds import Watermarks
from tiers.reader.remote_log_reader import RemoteRead

ZSTD_FROM = 10
"""The first version of Fetch whose clients know zstd."""

UNKNOWN_WATERMARKS = Watermarks(-1, -1)


class Budget(NamedTuple):
    max_bytes: int
    min_one_message: bool


class LocalReplacement(NamedTuple):
    """A partition entry of a later answer of the broker to the same request."""

    entry: Sequence[Buffer]
    records_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteOutcome:
    """What replaces a partition entry that the broker answered OFFSET_OUT_OF_RANGE."""

    error_code: int = ErrorCode.NONE
    watermarks: Watermarks = UNKNOWN_WATERMARKS
    log_start_offset: int = -1
    read: RemoteRead | None = None
    diverging_epoch: EpochEndOffset | None = None
    replacement: LocalReplacement | None = None
    """The broker's entry for the offsets behind the gap. If it finds no room, the other fields are the answer."""

    @property
    def records_bytes(self) -> int:
        if self.replacement is not None:
            return self.replacement.records_bytes
        return 0 if self.read is None else self.read.size_bytes


def reserve(partitions: Sequence[FetchPartition], remote: Iterable[int], max_bytes: int) -> dict[int, Budget]:
    """Budgets for the partitions at those indexes, in request order; their sum never exceeds `max_bytes`."""
    budgets: dict[int, Budget] = {}
    for index in sorted(remote):
        granted = max(0, min(partitions[index].partition_max_bytes, max_bytes))
        budgets[index] = Budget(granted, min_one_message=not budgets)
        max_bytes -= granted
    return budgets


def merge(
    response: FetchResponse,
    outcomes: Mapping[int, RemoteOutcome],
    *,
    max_bytes: int,
    is_read_committed: bool,
    local: Mapping[int, LocalReplacement],
    log_start_offsets: Mapping[int, int],
    session_id: int | None,
    splices: Sequence[Splice] = (),
) -> list[Buffer]:
    """The answer, its entries in the broker's order. All mappings are by index in `response.partitions`."""
    entries: dict[int, Sequence[Buffer]] = {index: replacement.entry for index, replacement in local.items()}
    room: int | None = None  # for records; whatever comes first has room
    for index, partition in enumerate(response.partitions):
        outcome = outcomes.get(index)
        if outcome is not None:
            entries[index], records_bytes = _entry(
                response.version, partition.partition, outcome, is_read_committed, room
            )
        else:
            records_bytes = local[index].records_bytes if index in local else partition.records_bytes
            if room is not None and records_bytes > room:
                records_bytes = 0
                # The first answer to this partition, which had no records, if this is not the first.
                if entries.pop(index, None) is None:
                    entries[index] = without_records(response, partition, log_start_offsets.get(index))
        if records_bytes:
            room = max(0, (max_bytes if room is None else room) - records_bytes)
    return rebuild_response(
        response, entries=entries, log_start_offsets=log_start_offsets, session_id=session_id, splices=splices
    )


def _entry(
    version: int, partition: int, outcome: RemoteOutcome, is_read_committed: bool, room: int | None
) -> tuple[Sequence[Buffer], int]:
    replacement = outcome.replacement
    if replacement is not None and (room is None or replacement.records_bytes <= room):
        return replacement.entry, replacement.records_bytes
    if outcome.error_code:
        return encode_partition(version, partition, error_code=outcome.error_code), 0
    read = outcome.read
    if read is not None and room is not None and read.size_bytes > room:
        read = None
    if read is not None and version < ZSTD_FROM and read.has_zstd:
        return encode_partition(version, partition, error_code=ErrorCode.UNSUPPORTED_COMPRESSION_TYPE), 0
    aborted: Sequence[AbortedTransaction] | None = None
    if is_read_committed:
        found = () if read is None or read.aborted_transactions is None else read.aborted_transactions
        aborted = [AbortedTransaction(one.producer_id, one.first_offset) for one in found]
    entry = encode_partition(
        version,
        partition,
        high_watermark=outcome.watermarks.high_watermark,
        last_stable_offset=outcome.watermarks.last_stable_offset,
        log_start_offset=outcome.log_start_offset,
        aborted_transactions=aborted,
        records=() if read is None else read.records,
        diverging_epoch=outcome.diverging_epoch,
    )
    return entry, 0 if read is None else read.size_bytes
