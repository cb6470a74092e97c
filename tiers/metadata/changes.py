"""`MetadataChanges`: the changes of the metadata that requests of clients cause. They need no ownership."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol
from uuid import UUID

from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogStart

CheckTierConfig = Callable[[Mapping[str, str]], None]
"""Raises an error if the present tier settings of a topic do not allow the change."""


class MetadataChanges(Protocol):
    """`RemoteLogMetadataManager` implements it where the metadata is followed, which other processes ask to change it.

    Each method returns after the state has the change, and raises `RemoteLogError`."""

    async def put_log_start(self, partition: TopicIdPartition, start: LogStart, timeout_ms: int | None = None) -> None:
        """Records where the log starts, unless that is known already. `timeout_ms` None: the timeout of all writes."""

    async def put_topic_deletion(self, topic_id: UUID, topic: str, *, is_confirmed: bool) -> None:
        """Records that a client is about to delete the topic, or an operator's word."""

    async def change_topic_tier_config(
        self, topic_id: UUID, topic: str, changes: Mapping[str, str | None], check: CheckTierConfig
    ) -> None:
        """Sets keys of the topic's tier settings; None removes a key.

        `check` gets the settings right before the change. An exception from it reaches the caller, and nothing
        changes. It must be picklable."""
