"""`LogSource`: a partition's log as its leader holds it, in raw record batches (semantics 13).

* Offsets are next offsets unless a name says `end` (inclusive);
  `high_watermark >= last_stable_offset >= log_start_offset`.
* Only batches below the last stable offset are returned, whole, verbatim, CRC-checked, ascending and without overlap.
* Every answer comes from the leader of the leader epoch it names. A moved leader is found again within the deadline;
  after it, and for every other trouble, `BrokerError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiers.model.ids import TopicIdPartition


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """As Fetch v4+ reports it under read_committed."""

    producer_id: int
    first_offset: int


@dataclass(frozen=True, slots=True)
class LocalLogBounds:
    """Lx, LSO and HW of the local log, all next offsets but the start."""

    log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class LogRead:
    """One answer. `records` may be empty; `aborted_transactions` is complete for the offsets in it."""

    records: bytes
    log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    leader_epoch: int
    aborted_transactions: tuple[AbortedTransaction, ...]


@dataclass(frozen=True, slots=True)
class EpochEndOffset:
    """OffsetForLeaderEpoch's answer; (-1, -1) when the leader knows nothing of it."""

    leader_epoch: int
    end_offset: int


class LogSource(Protocol):
    async def bounds(self, partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        """Asked of the leader now, not from a cache."""

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        """Batches from the one that holds `offset` on, at least one when any lies below the LSO.

        Raises `OffsetGapError` when `offset` is below the leader's log start, `LogDivergedError` when it is above its
        log end, `BrokerError` with code UNKNOWN_TOPIC_ID when the topic's id is not this one any more.
        """

    async def end_offset_for_epoch(
        self, partition: TopicIdPartition, leader_epoch: int, timeout_ms: int
    ) -> EpochEndOffset:
        """Where `leader_epoch` ends in the leader's log."""

    async def delete_records(
        self,
        partition: TopicIdPartition,
        offset: int,
        leader_epoch: int,
        timeout_ms: int,
        check_ownership: Callable[[], None],
    ) -> int:
        """Trims the log to start at `offset`; returns the low watermark.

        The topic id and `leader_epoch` are checked on the leader's own connection right before (safety rule 4);
        a difference raises `BrokerError` and trims nothing. `check_ownership` is called last before every request that
        trims, the repeated ones too: what it raises is raised.
        """
