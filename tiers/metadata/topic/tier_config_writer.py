"""`TierConfigWriter` makes the changes of a topic's tier settings one after the other in the whole cluster.

Whether a change is valid depends on the settings before it, and two proxies may receive changes at the same time. So
reading, checking and writing are one operation. A writer initializes the transactional.id of the metadata partition,
which fences every writer that has not committed yet, and then reads to the end. So a successful commit proves that no
other change came between. A fenced writer checks its change again. All settings of a topic are one record, or a
tombstone when none is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence

from tiers.broker.client import BrokerClient
from tiers.errors import OwnershipLostError
from tiers.metadata.records.record_types import KeyAndValue
from tiers.metadata.topic.metadata_producer import TransactionalProducer
from tiers.metadata.topic.metadata_topic import MetadataTopic

_BACKOFF_BASE_MS = 50
_BACKOFF_CAP_MS = 500


def tier_config_transactional_id(prefix: str, metadata_partition: int) -> str:
    return f"{prefix}-tier-configs-{metadata_partition}"


class TierConfigWriter:
    """Writes the changes of tier settings.

    `prefix` must be the same in every proxy that shares the metadata topic."""

    def __init__(
        self,
        client: BrokerClient,
        prefix: str,
        *,
        clock_ms: Callable[[], int],
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self._prefix = prefix
        self._clock_ms = clock_ms
        self._jitter = jitter
        self._writing: dict[int, asyncio.Lock] = {}

    async def write(
        self,
        topic: MetadataTopic,
        metadata_partition: int,
        read_to_end: Callable[[int], Awaitable[None]],
        records: Callable[[], Sequence[KeyAndValue]],
        timeout_ms: int,
    ) -> int | None:
        """Commits the records that `records` makes from all earlier commits, and returns the offset of the last one.

        `read_to_end` is called with the milliseconds that are left. `records` may be called more than once. An
        exception from it reaches the caller. Without records, nothing is written, and the result is None. Raises
        `RemoteLogMetadataError` when the records were not written, or when that is not known."""
        deadline_ms = self._clock_ms() + timeout_ms
        async with self._writing.setdefault(metadata_partition, asyncio.Lock()):
            failures = 0
            while True:
                producer = TransactionalProducer(
                    self._client,
                    topic,
                    metadata_partition,
                    tier_config_transactional_id(self._prefix, metadata_partition),
                    clock_ms=self._clock_ms,
                    jitter=self._jitter,
                )
                try:
                    await producer.initialize(deadline_ms - self._clock_ms())
                    await read_to_end(deadline_ms - self._clock_ms())
                    made = records()
                    if not made:
                        return None
                    return await producer.commit(made, None, deadline_ms - self._clock_ms())
                except OwnershipLostError:
                    cap_ms = min(_BACKOFF_CAP_MS, _BACKOFF_BASE_MS << min(failures, 10))
                    failures += 1
                    if self._clock_ms() + cap_ms >= deadline_ms:
                        raise
                    await asyncio.sleep(cap_ms * self._jitter() / 1000)
