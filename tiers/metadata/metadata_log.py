"""`MetadataLog`: the log of the records that remote log metadata consists of (KIP-405).

The records build the materialised state, which answers every look-up. `RemoteLogMetadataManager` makes the records of
each write. There are two logs: the metadata topic (`topic/topic_based.py`), and a log with one writer over the
`MetadataRecordLog` of a third party (`single_writer_log.py`). `shared_metadata.py` gives a process the state that
another process keeps. `tests/contract/test_metadata_log.py` tests them, but no test of one process can show fencing and
durability.

A log must guarantee:

* Strong consistency. An append returns after this process's state has the records, so a process reads its own writes.
  All processes see the records of a partition in the same order. The records of one append appear as a whole or not at
  all.
* Ownership. At most one process owns a partition at a time. `owns` is true only when the owner's state has every record
  of earlier owners, and when its ownership was confirmed less than 2 s ago.
* Fencing. An append by a process that lost the ownership raises `OwnershipLostError`, and no reader ever sees it,
  however long the process was suspended before.
* Freshness. `ensure_fresh` and `is_fresh` limit the age of an answer: the state has every record that was acknowledged
  to any process up to that age ago (docs/design.md, safety rule 1). A log that does not know this is not fresh. Callers
  then answer an error that clients retry.
* Durability. A record that an append acknowledged survives the crash of every process and machine. The owner trims the
  broker's copy after that. If records were lost anyway, `confirms` is false for a position beyond them. A log that
  notices the loss raises an alarm (`status`), and is neither fresh nor owned. Empty metadata never replaces lost
  metadata.
* Order. Concurrent appends of a process to one partition take effect one after the other, each with the knowledge of
  the earlier ones.

A log may assume:

* One event loop calls it. `open` comes first and `close` last. The folder of its state belongs to this process.
* After an error or a cancellation of an append, the caller does not know whether it happened. It reads the state again
  before it continues, so the log need not undo anything.
* Every segment id is used once, and each append concerns one user partition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple, Protocol
from uuid import UUID

from kafka.partitioner import murmur2

from tiers.metadata.records.serde import KeyAndValue
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition


class Tenure(NamedTuple):
    """A time in which no other owner can have written a metadata partition, over rebalances and takeovers.

    A process may lose and regain the ownership within one tenure: in a rebalance that leaves the partition with it, or
    when it recovers from an error. What it began within a tenure, it may finish within the same tenure. When another
    owner may have written in between, or when the state has lacked records that are read again, the next tenure begins,
    and everything that was begun before must be dropped."""

    metadata_partition: int
    number: int


_begun_in: ContextVar[Tenure | None] = ContextVar("begun_in", default=None)


def begin_in(tenure: Tenure | None) -> None:
    """Declares that this task, and those that it creates from now on, work within the tenure.

    Their writes as an owner wait for a short loss of the ownership, and fail when the tenure has ended."""
    _begun_in.set(tenure)


def begun_in(metadata_partition: int) -> Tenure | None:
    """Returns the tenure of the metadata partition in which this task works; None: it works in none."""
    tenure = _begun_in.get()
    return tenure if tenure is not None and tenure.metadata_partition == metadata_partition else None


MakeRecords = Callable[[], Sequence[KeyAndValue]]
"""Makes the records of one append from the state. It may raise an error, which reaches the caller of the append."""


class MetadataPosition(NamedTuple):
    """A position in a metadata partition: the next offset, and the leader epoch of the last batch before it.

    If the metadata is not in a topic, `topic_id` identifies the log that has it."""

    topic_id: UUID
    leader_epoch: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class MetadataStatus:
    """The log's status for operators."""

    alarm: str | None
    """The trouble that an operator must end; None without any. While there is trouble, nothing is written."""
    freshness_age_ms: int | None
    """The age of the metadata partition that is furthest behind; None: not all partitions were read yet."""
    owned_partitions: frozenset[int] = frozenset()
    """The metadata partitions that this process owns."""
    foreign_records_read: int = 0
    clock_skew_ms: int | None = None
    """How far the clock of `event_timestamp_ms` is ahead of this machine's clock; None: no record was written yet."""


class Append(Enum):
    """The right by which a process appends, and what `MakeRecords` then knows."""

    AS_OWNER = auto()
    """The state has all records of earlier owners and of this process. Else `OwnershipLostError` is raised."""
    AT_ONCE = auto()
    """Needs no ownership, and knows nothing."""
    WHEN_FRESH = auto()
    """Needs no ownership. The state has all records that were appended before the call."""
    IN_TURN = auto()
    """Needs no ownership. No other process appends in turn after the records are made, which may happen repeatedly."""


class FreshMetadata(Protocol):
    """The state, and as of when it is complete."""

    @property
    def state(self) -> RemoteLogMetadataState:
        """The state of this process. Raises `RemoteLogMetadataNotReadyError` before `open`."""

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        """Waits until the partition's metadata was read to its high watermark at most `max_age_ms` ago.

        Returns at once when it is fresh already. Raises `RemoteLogMetadataNotReadyError` after `timeout_ms`."""

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        """Returns whether the metadata is that fresh, without waiting."""


class MetadataLog(FreshMetadata, Protocol):
    async def open(self) -> None:
        """Raises a `RemoteLogError`. If it is retriable, the caller calls `close`, and then `open` again."""

    async def close(self) -> None:
        """Gives up the ownership. It may be called twice, and after `open` failed."""

    @property
    def writer(self) -> str:
        """The name of this process in the records that it writes."""

    @property
    def topic_id(self) -> UUID | None:
        """The id of the metadata topic; None if the metadata is not in a topic of the cluster.

        While no broker knows the metadata topic by this id, the owners delete no missing topic."""

    async def append(
        self, partition: TopicIdPartition, records: MakeRecords, by: Append, timeout_ms: int | None = None
    ) -> None:
        """Appends the records in one step, and returns after the state has them. Without records, it does nothing.

        The append may have to wait for others, and may be sent again. So `records` is called right before the records
        are sent, each time. If it raises an error, nothing more is sent. `timeout_ms` None: the log's own timeout."""

    def owns(self, partition: TopicIdPartition) -> bool:
        """Returns whether this task may act as the owner now: the process is the owner, and the task's tenure goes on.

        An owner has read all records, is not fenced, and had its membership confirmed less than 2 s ago."""

    def tenure(self, partition: TopicIdPartition) -> Tenure | None:
        """Returns the tenure in which this process owns the partition, or waits to own it again; None: it has ended.

        The value changes when another owner may have written, and when the state is read again from the start.
        `begin_in` ties a task to a tenure."""

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        """How far this process has read the metadata partition of `partition`."""

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        """Returns whether the metadata topic has the id in `position`, and its log still reaches that position.

        The log must also have the same history up to there. Raises `RemoteLogError` when the leader does not answer."""

    def status(self) -> MetadataStatus:
        """Returns the status. It may be called at any time, also before `open` and after `close`."""


_MASK = 0xFFFFFFFF
_POSITIVE = 0x7FFFFFFF


@lru_cache(maxsize=8_192)
def by_topic_id(partition: TopicIdPartition, partition_count: int) -> int:
    """Returns the metadata partition of a user partition, by Kafka's RemoteLogMetadataTopicPartitioner.

    See docs/semantics.md 11.4. It distinguishes a topic from an earlier one of the same name."""
    most = partition.topic_id.int >> 64
    least = partition.topic_id.int & 0xFFFFFFFFFFFFFFFF
    hashed = 31 + _long_hash(least)
    hashed = 31 * hashed + _long_hash(most)
    hashed = (31 * hashed + partition.partition) & _MASK
    return int(murmur2(hashed.to_bytes(4, "big")) & _POSITIVE) % partition_count


def _long_hash(value: int) -> int:
    return (value ^ value >> 32) & _MASK
