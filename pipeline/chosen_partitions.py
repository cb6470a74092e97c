"""`chosen_partitions`: selects partitions by a job's topic pattern. A pattern without a match is an error."""

from __future__ import annotations

import re

from pipeline.spark.job import JobError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.ids import TopicIdPartition


class NothingChosenError(JobError):
    """The pattern is invalid or matches no topic. The user can correct that."""


def chosen_partitions(metadata: RemoteLogMetadataReader, topics: str | None) -> list[TopicIdPartition]:
    """Returns the partitions whose topic name matches `topics` as a whole, sorted by topic name.

    If `topics` is None, returns all partitions, possibly none. Raises `NothingChosenError`."""
    try:
        pattern = re.compile(".*" if topics is None else topics, re.DOTALL)
    except re.error as error:
        raise NothingChosenError(f"{topics!r} is not a regular expression: {error}") from None
    found = [each for each in metadata.partitions() if pattern.fullmatch(each.topic)]
    if topics is not None and not found:
        raise NothingChosenError(f"no topic in the remote tier matches {topics}")
    return sorted(found, key=lambda each: (each.topic, each.topic_id, each.partition))
