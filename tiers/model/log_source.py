"""`LogSource`: a partition's log on its leader, in raw record batches (docs/semantics.md 13).

* `high_watermark` and `last_stable_offset` are next offsets, and
  `high_watermark >= last_stable_offset >= log_start_offset`.
* It returns only batches below the last stable offset: whole, verbatim, CRC-checked, ascending and without overlap.
* Every answer comes from the leader of the leader epoch that it names. If the leader moves, the source finds the new
  one within the deadline. At the deadline and for every other error it raises `BrokerError`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from tiers.model.ids import TopicIdPartition


@dataclass(frozen=True, slots=True)
class AbortedTransaction:
    """An aborted transaction, as Fetch v4+ reports it under read_committed."""

    producer_id: int
    first_offset: int


@dataclass(frozen=True, slots=True)
class LocalLogBounds:
    """The log start offset (Lx), LSO and HW of the local log; LSO and HW are next offsets."""

    log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    leader_epoch: int


@dataclass(frozen=True, slots=True)
class LogRead:
    """The result of a read. `records` may be empty. `aborted_transactions` is complete for the offsets in `records`."""

    records: bytes
    log_start_offset: int
    last_stable_offset: int
    high_watermark: int
    leader_epoch: int
    aborted_transactions: tuple[AbortedTransaction, ...]


@dataclass(frozen=True, slots=True)
class EpochEndOffset:
    """The answer to OffsetForLeaderEpoch; (-1, -1) when the leader does not know the epoch."""

    leader_epoch: int
    end_offset: int


class LogSource(Protocol):
    async def bounds(self, partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        """Returns the bounds of the log. Asks the leader now, and never uses a cache."""

    async def size_bytes(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        """Returns the bytes of the leader's replica. None: the broker does not answer.

        The answer may be some seconds old. The replica has records below the log start too, until the broker removes
        the whole file that has them."""

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        """Returns batches from the one that holds `offset` on, at least one if any lies below the LSO.

        Raises `OffsetGapError` when `offset` is below the leader's log start, `LogDivergedError` when it is above the
        leader's high watermark, and `BrokerError` with code UNKNOWN_TOPIC_ID when no topic has this id any more.
        """

    async def end_offset_for_epoch(
        self, partition: TopicIdPartition, leader_epoch: int, timeout_ms: int
    ) -> EpochEndOffset:
        """Returns the end offset of `leader_epoch` in the leader's log."""

    async def delete_records(
        self,
        partition: TopicIdPartition,
        offset: int,
        leader_epoch: int,
        timeout_ms: int,
        check_ownership: Callable[[], None],
    ) -> int:
        """Trims the log so that it starts at `offset`. Returns the low watermark.

        Immediately before, it checks the topic id and `leader_epoch` on the leader's own connection
        (docs/design.md, safety rule 4). If one differs, it raises `BrokerError` and trims nothing. It calls
        `check_ownership` right before every request that trims, also before a retried one, and raises the errors of
        `check_ownership`.
        """
