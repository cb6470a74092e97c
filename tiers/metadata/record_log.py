"""`MetadataRecordLog`: the interface by which third parties keep remote log metadata somewhere else than in a topic.

`remote.log.metadata.manager.class.name` names an entry point of the group `tidegate.remote_log_metadata_manager`, or
`module:Class` (`MetadataRecordLogFactory`). `docs/examples/sqlite-metadata` is a complete example.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol
from uuid import UUID

from tiers.metadata.records.serde import KeyAndValue

RefusalToCreate = Callable[[], Awaitable[str | None]]
"""Called before missing metadata is created. It returns why that must not happen, for an operator, or None."""


class MetadataRecordLogFactory(Protocol):
    """The class that an entry point of the group `tidegate.remote_log_metadata_manager` or `module:Class` names."""

    def create(self, settings: Mapping[str, str]) -> MetadataRecordLog:
        """Returns a log that is not yet open. It is a class method.

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

    `SingleWriterLog` calls all methods except `is_held` on one thread of its own, so they may block. Every method
    raises `RemoteLogMetadataError` when the log cannot be used."""

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
