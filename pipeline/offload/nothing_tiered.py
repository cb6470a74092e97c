"""`NothingTieredYet`: the metadata of a cluster without a metadata topic, for a caller that must create nothing."""

from __future__ import annotations

import time
from uuid import UUID

from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.topic.topic_based import TopicBasedRemoteLogMetadataManager

_NO_TOPIC = StateIdentity("", UUID(int=0), 1)


class NothingTieredYet(TopicBasedRemoteLogMetadataManager):
    """Knows no segment and no setting, is never fresh, and can write nothing."""

    async def open(self) -> None:
        self._opened_state = RemoteLogMetadataStateWriter.open(
            self._settings.state_folder, _NO_TOPIC, wall_clock_ms=lambda: time.time_ns() // 1_000_000
        )
