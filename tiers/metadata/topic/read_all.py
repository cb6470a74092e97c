"""`read_all` reads the whole metadata topic to its end, however many records it has.

`ensure_fresh` is for callers that wait for a few records. A new state reads a million segments for minutes, so
`read_all` waits as long as more records arrive.
"""

from __future__ import annotations

from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.topic.follower import MetadataFollower
from tiers.metadata.topic.metadata_topic import MetadataTopic


async def read_all(follower: MetadataFollower, topic: MetadataTopic, max_age_ms: int, patience_ms: int) -> None:
    """Waits until every metadata partition is fresh, as `ensure_fresh` does.

    Raises `RemoteLogMetadataNotReadyError` when no record arrived for `patience_ms`."""
    numbers = range(topic.partition_count)
    for number in numbers:
        while True:
            reached = sum(map(follower.position, numbers))
            try:
                await follower.ensure_fresh(number, max_age_ms, patience_ms)
                break
            except RemoteLogMetadataNotReadyError:
                if sum(map(follower.position, numbers)) == reached:
                    raise
