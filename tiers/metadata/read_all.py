"""`read_all`: the metadata topic to its end, however much it holds.

`ensure_fresh` is for who waits for a few records. A state that begins with nothing reads a million segments for
minutes: then what is waited for is that more comes, not the end.
"""

from __future__ import annotations

from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.follower import MetadataFollower
from tiers.metadata.metadata_topic import MetadataTopic


async def read_all(follower: MetadataFollower, topic: MetadataTopic, max_age_ms: int, patience_ms: int) -> None:
    """Every partition as `ensure_fresh`. `RemoteLogMetadataNotReadyError`: nothing more came for `patience_ms`."""
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
