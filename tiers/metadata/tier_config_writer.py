"""`TierConfigWriter`: tier settings of a topic change one change at a time in the whole cluster.

Whether a change may be depends on what the topic has before it, and two proxies may be asked at once. So a change is
read, judged and written as one: whoever initializes the transactional.id of the metadata partition fences everybody who
has not committed yet, then reads to the end. A commit that succeeds thus says that nobody else's came between; one that
is fenced is judged anew. All settings of a topic are one record, a tombstone when none is left.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping

from tiers.broker.client import BrokerClient
from tiers.errors import OwnershipLostError
from tiers.metadata.metadata_producer import KeyAndValue, TransactionalProducer
from tiers.metadata.metadata_topic import MetadataTopic
from tiers.metadata.serde import encode_key, encode_value, key_of
from tiers.model.segment_metadata import TopicTierConfigUpdate

CheckTierConfig = Callable[[Mapping[str, str]], None]
"""Given what the topic has before the change; what it raises ends the change."""

_BACKOFF_BASE_MS = 50
_BACKOFF_CAP_MS = 500


def changed_tier_config(known: TopicTierConfigUpdate, changes: Mapping[str, str | None]) -> KeyAndValue | None:
    """`known` with its writer and time as the new record has them; None when nothing changes."""
    merged = {**known.config, **changes}
    config = {key: value for key, value in merged.items() if value is not None}
    if config == known.config:
        return None
    update = TopicTierConfigUpdate(known.topic_id_partition, known.writer, known.event_timestamp_ms, config)
    return encode_key(key_of(update)), encode_value(update) if config else None


def tier_config_transactional_id(prefix: str, metadata_partition: int) -> str:
    return f"{prefix}-tier-configs-{metadata_partition}"


class TierConfigWriter:
    """`prefix` is the same in every proxy of a cluster that shares a metadata topic."""

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
        record: Callable[[], KeyAndValue | None],
        timeout_ms: int,
    ) -> int | None:
        """Commits what `record` makes of all that was committed before; returns its offset.

        `read_to_end` is given the milliseconds left. `record` may be called again; what it raises comes out, and None
        writes nothing. `RemoteLogMetadataError`: not written, or not known."""
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
                    made = record()
                    if made is None:
                        return None
                    return await producer.commit([made], None, -1, deadline_ms - self._clock_ms())
                except OwnershipLostError:
                    cap_ms = min(_BACKOFF_CAP_MS, _BACKOFF_BASE_MS << min(failures, 10))
                    failures += 1
                    if self._clock_ms() + cap_ms >= deadline_ms:
                        raise
                    await asyncio.sleep(cap_ms * self._jitter() / 1000)
