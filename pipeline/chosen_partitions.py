"""`chosen_partitions`: what a job's pattern for topics means. One that matches nothing is a mistake, and is said."""

from __future__ import annotations

import re

from pipeline.job import JobError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition


class NothingChosenError(JobError):
    """Whoever called can put it right."""


def chosen_partitions(metadata: RemoteLogMetadataReader, topics: str | None) -> list[TopicIdPartition]:
    """Whose topic's whole name matches, by name; None: all, be there any or not. Raises `JobError`."""
    try:
        pattern = re.compile(".*" if topics is None else topics, re.DOTALL)
    except re.error as error:
        raise NothingChosenError(f"{topics!r} is no pattern: {error}") from None
    found = [each for each in metadata.partitions() if pattern.fullmatch(each.topic)]
    if topics is not None and not found:
        raise NothingChosenError(f"nothing of {topics} is in the remote tier")
    return sorted(found, key=lambda each: (each.topic, each.topic_id, each.partition))
