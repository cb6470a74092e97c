"""`chosen_partitions`: selects partitions by a job's topic pattern. A pattern without a match is an error."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.texts import did_you_mean
from tiers.upkeep.runner import JobError


class NothingChosenError(JobError):
    """The pattern is invalid or matches no topic. The user can correct that."""


def nothing_chosen(what: str, topics: str, known: Iterable[str]) -> NothingChosenError:
    """Returns the error for a pattern that matches none of the `known` topics. It names the nearest of them."""
    return NothingChosenError(f"no {what} matches {topics!r}{did_you_mean(topics, known)}")


def chosen_partitions(metadata: RemoteLogMetadataState, topics: str | None) -> list[TopicIdPartition]:
    """Returns the partitions whose topic name matches `topics` as a whole, sorted by topic name.

    If `topics` is None, returns all partitions, possibly none. Raises `NothingChosenError`."""
    try:
        pattern = re.compile(".*" if topics is None else topics, re.DOTALL)
    except re.error as error:
        raise NothingChosenError(f"{topics!r} is not a regular expression: {error}") from None
    known = metadata.partitions()
    found = [each for each in known if pattern.fullmatch(each.topic)]
    if topics is not None and not found:
        raise nothing_chosen("topic in the remote tier", topics, {each.topic for each in known})
    return sorted(found, key=lambda each: (each.topic, each.topic_id, each.partition))
