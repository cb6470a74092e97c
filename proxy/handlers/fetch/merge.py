"""Merges the data of two tiers into one Fetch response, within the byte limits (docs/semantics.md 3.6).

* The remote partitions get their budgets from the request's MaxBytes, in request order. The broker gets the rest.
* min-one-message (KIP-74): the first batch of the first partition that has bytes may exceed every limit. A later
  partition whose bytes do not fit is left out, as on one broker. Each tier lets its own first partition through,
  because neither tier knows what the other has. Only the request order decides which partition is the first: clients
  rotate the order, so each partition becomes the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from protocol.apis.fetch.encoding import encode_partition
from protocol.apis.fetch.request import FetchPartition
from protocol.apis.fetch.response import (
    AbortedTransaction,
    EpochEndOffset,
    FetchResponse,
    rebuild_response,
    without_records,
)
from protocol.errors import ErrorCode
from protocol.primitives import Buffer
from protocol.splice import Splice
from protocol.steps import Stepped, Steps
from proxy.cluster.local_log_bounds import Watermarks
from tiers.reader.remote_log_reader import RemoteRead

ZSTD_FROM = 10
"""The first version of Fetch whose clients support zstd."""

UNKNOWN_WATERMARKS = Watermarks(-1, -1)


class Budget(NamedTuple):
    max_bytes: int
    min_one_message: bool


class LocalReplacement(NamedTuple):
    """A partition's entry in a later answer of the broker to the same client request."""

    entry: Sequence[Buffer]
    records_bytes: int


@dataclass(frozen=True, slots=True)
class RemoteOutcome:
    """The replacement for a partition's entry that the broker answered OFFSET_OUT_OF_RANGE."""

    error_code: int = ErrorCode.NONE
    watermarks: Watermarks = UNKNOWN_WATERMARKS
    log_start_offset: int = -1
    read: RemoteRead | None = None
    diverging_epoch: EpochEndOffset | None = None
    replacement: LocalReplacement | None = None
    """The broker's entry for the offsets behind the gap. If it does not fit, the other fields are the answer."""

    @property
    def records_bytes(self) -> int:
        if self.replacement is not None:
            return self.replacement.records_bytes
        return 0 if self.read is None else self.read.size_bytes


def split_max_bytes(partitions: Sequence[FetchPartition], remote: Iterable[int], max_bytes: int) -> dict[int, Budget]:
    """Returns budgets for the partitions at the indexes `remote`. It grants them in request order.

    The sum of the budgets never exceeds `max_bytes`."""
    budgets: dict[int, Budget] = {}
    for index in sorted(remote):
        granted = max(0, min(partitions[index].partition_max_bytes, max_bytes))
        budgets[index] = Budget(granted, min_one_message=not budgets)
        max_bytes -= granted
    return budgets


@Stepped
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
) -> Steps[list[Buffer]]:
    """Returns the merged response, in the broker's order. All mappings are by index in `response.partitions`."""
    entries: dict[int, Sequence[Buffer]] = {index: replacement.entry for index, replacement in local.items()}
    room: int | None = None  # the bytes left for records; None before the first records, which always fit
    for index, partition in enumerate(response.partitions):
        yield
        outcome = outcomes.get(index)
        if outcome is not None:
            entries[index], records_bytes = _entry(
                response.version, partition.partition, outcome, is_read_committed, room
            )
        else:
            records_bytes = local[index].records_bytes if index in local else partition.records_bytes
            if room is not None and records_bytes > room:
                records_bytes = 0
                # If a later answer does not fit, the broker's first answer is used, which had no records.
                if entries.pop(index, None) is None:
                    entries[index] = without_records(response, partition, log_start_offsets.get(index))
        if records_bytes:
            room = max(0, (max_bytes if room is None else room) - records_bytes)
    rebuild = rebuild_response.steps
    return (
        yield from rebuild(
            response, entries=entries, log_start_offsets=log_start_offsets, session_id=session_id, splices=splices
        )
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
