"""What is written when a topic's tier settings change: all of them in one record, a tombstone when none is left."""

from __future__ import annotations

from collections.abc import Mapping

from tiers.metadata.metadata_producer import KeyAndValue
from tiers.metadata.serde import encode_key, encode_value, key_of
from tiers.model.segment_metadata import TopicTierConfigUpdate


def changed_tier_config(known: TopicTierConfigUpdate, changes: Mapping[str, str | None]) -> KeyAndValue | None:
    """`known` with its writer and time as the new record has them; None when nothing changes."""
    merged = {**known.config, **changes}
    config = {key: value for key, value in merged.items() if value is not None}
    if config == known.config:
        return None
    update = TopicTierConfigUpdate(known.topic_id_partition, known.writer, known.event_timestamp_ms, config)
    return encode_key(key_of(update)), encode_value(update) if config else None
