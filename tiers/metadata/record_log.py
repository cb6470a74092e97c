"""`MetadataRecordLog`: the small interface behind a metadata manager of one's own, and what such a manager is given."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol
from uuid import UUID

from tiers.broker.client import BrokerClient
from tiers.fitness import Fitness
from tiers.metadata.records.record_types import KeyAndValue
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import MAX_AGE_MS


@dataclass(frozen=True, slots=True)
class MetadataManagerContext:
    """What every metadata manager gets, beside its own settings. The caller keeps and closes the client."""

    state_folder: Path
    """The folder of the materialised state, which belongs to one process at a time."""
    client: BrokerClient
    cluster_id: str
    """The id of the Kafka cluster. Metadata of another cluster must not be used."""
    topic: MetadataTopicSettings
    """The keys `remote.log.metadata.topic.*`, for the topic-based manager."""
    refusal_to_create: Callable[[], Awaitable[str | None]]
    """Called before missing metadata is created. It returns why that must not happen, for an operator, or None."""
    fitness: Fitness | None = None
    """Whether this process can work as an owner. A manager may add probes, before it is open."""
    declares: Callable[[], str] = str
    """Returns digests of the settings that all proxies of a cluster need the same."""
    max_age_ms: int = MAX_AGE_MS
    """The age up to which metadata is fresh, half of T_vis. A manager should read often enough for that."""


class MetadataManagerFactory(Protocol):
    """The class that an entry point of the group `tidegate.remote_log_metadata_manager` or `module:Class` names."""

    def create(self, settings: Mapping[str, str], context: MetadataManagerContext) -> RemoteLogMetadataManager:
        """Returns a manager that is not yet open. It is a class method.

        `settings` has the keys `remote.log.metadata.*` that Tidegate does not know, without that prefix. Raises
        `ValueError` for an unknown or invalid setting; `read_settings` of `tiers/storage/settings.py` names the
        nearest known one."""


class LoggedRecord(NamedTuple):
    """A record in the log. Its `timestamp_ms` is the time of its append."""

    offset: int
    timestamp_ms: int
    key: bytes
    value: bytes | None


class RecordLogIdentity(NamedTuple):
    """The identity of a log. No other log ever has the same `log_id`, not even one in the same place."""

    log_id: UUID
    cluster_id: str


class MetadataRecordLog(Protocol):
    """An ordered log of records. One process at a time holds it, and only that process appends.

    `RecordLogMetadataManager` makes a metadata manager of it. It calls all methods except `is_held` on one thread of
    its own, so they may block. Every method raises `RemoteLogMetadataError` when the log cannot be used."""

    @property
    def place(self) -> str:
        """Where the log is, for messages to an operator."""

    def open(self, cluster_id: str, *, may_create: bool) -> RecordLogIdentity | None:
        """Takes the log for this process, and fences every earlier holder.

        Returns None when there is no log and `may_create` is false. A new log keeps `cluster_id`. Raises a
        `RemoteLogMetadataError` that is not retriable when another process holds the log. The log of a process that
        was killed is free at once."""

    def is_held(self) -> bool:
        """Returns whether this process still holds the log. It is called on the event loop, so it must be quick."""

    def append(self, records: Sequence[KeyAndValue], timestamp_ms: int) -> None:
        """Appends all records or none. When it returns, they survive a crash of the process and of the machine.

        Offsets ascend and are never used twice. The log may drop an earlier record with the same key. Raises
        `OwnershipLostError` when another process took the log since; then the log has none of the records."""

    def read(self, offset: int, max_records: int) -> list[LoggedRecord]:
        """Returns the records from `offset` on, in order. Fewer than `max_records` mean that they reach the end."""

    def next_offset(self) -> int:
        """Returns the offset of the next append. It never falls, also when the last records are dropped."""

    def epoch_before(self, next_offset: int) -> int:
        """Returns the epoch of the last append before `next_offset`, and -1 before the first append.

        Each `open` starts a new epoch, which is higher than all earlier ones. If the log was restored from an old copy,
        its epochs show that it has another history from there on: so a restored log must not use an epoch again."""

    def drop_tombstones(self, before_ms: int) -> None:
        """May drop the tombstones that were appended before `before_ms`."""

    def close(self) -> None:
        """Gives the log up. It may be called twice, and after `open` failed."""
