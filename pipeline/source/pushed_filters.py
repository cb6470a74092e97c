"""`push`: splits Spark's filters into those that the plan applies exactly and those that only let it skip data.

Filters on offset, partition and topic are exact, so Spark need not apply them again. A lower bound of the timestamp
skips segments, chunks and batches; Spark still checks each remaining record. Timestamps do not ascend with offsets, so
an upper bound skips nothing. Only simple filters joined by AND arrive here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

_NEVER_NULL = frozenset({"topic", "partition", "offset", "timestamp", "timestampType"})
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND = timedelta(milliseconds=1)
MAX_OFFSET = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Wanted:
    """Conditions that must all hold. Offsets and partitions are inclusive. None means no condition."""

    topics: frozenset[str] | None = None
    topic_prefixes: tuple[str, ...] = ()
    partitions: frozenset[int] | None = None
    first_partition: int = 0
    last_partition: int = MAX_OFFSET
    first_offset: int = 0
    end_offset: int = MAX_OFFSET
    min_timestamp_ms: int | None = None

    def has(self, topic: str, partition: int) -> bool:
        return (
            (self.topics is None or topic in self.topics)
            and all(topic.startswith(prefix) for prefix in self.topic_prefixes)
            and (self.partitions is None or partition in self.partitions)
            and self.first_partition <= partition <= self.last_partition
        )


def push(filters: Iterable[Filter]) -> tuple[Wanted, list[Filter]]:
    """Returns the combined conditions, and the filters that Spark must still apply."""
    wanted = Wanted()
    residual: list[Filter] = []
    for one in filters:
        narrowed, is_exact = _narrowed(wanted, one)
        wanted = narrowed
        if not is_exact:
            residual.append(one)
    return wanted, residual


def _narrowed(wanted: Wanted, one: Filter) -> tuple[Wanted, bool]:
    attribute: tuple[str, ...] = getattr(one, "attribute", ())
    if len(attribute) != 1:
        return wanted, False
    if isinstance(one, IsNotNull):
        return wanted, attribute[0] in _NEVER_NULL
    value = getattr(one, "value", None)
    if value is None:
        return wanted, False
    narrow: dict[str, Callable[[Wanted, Filter, object], tuple[Wanted, bool]]] = {
        "topic": _topic,
        "partition": _partition,
        "offset": _offset,
        "timestamp": _timestamp,
    }
    return narrow.get(attribute[0], _nothing)(wanted, one, value)


def _nothing(wanted: Wanted, one: Filter, value: object) -> tuple[Wanted, bool]:
    return wanted, False


def _topic(wanted: Wanted, one: Filter, value: object) -> tuple[Wanted, bool]:
    if isinstance(one, StringStartsWith) and isinstance(value, str):
        return replace(wanted, topic_prefixes=(*wanted.topic_prefixes, value)), True
    names = frozenset(each for each in _values_of(one, value) or () if isinstance(each, str))
    if _values_of(one, value) is None:
        return wanted, False
    return replace(wanted, topics=names if wanted.topics is None else wanted.topics & names), True


def _partition(wanted: Wanted, one: Filter, value: object) -> tuple[Wanted, bool]:
    if (values := _values_of(one, value)) is not None:
        numbers = frozenset(each for each in values if isinstance(each, int))
        return replace(wanted, partitions=numbers if wanted.partitions is None else wanted.partitions & numbers), True
    found = _interval(one, value)
    if found is None:
        return wanted, False
    first, last = found
    return replace(
        wanted, first_partition=max(wanted.first_partition, first), last_partition=min(wanted.last_partition, last)
    ), True


def _offset(wanted: Wanted, one: Filter, value: object) -> tuple[Wanted, bool]:
    values = _values_of(one, value)
    is_exact = True
    if values is not None:
        numbers = [each for each in values if isinstance(each, int)]
        first, last = min(numbers, default=0), max(numbers, default=-1)
        is_exact = last - first + 1 == len(set(numbers))
    elif (found := _interval(one, value)) is not None:
        first, last = found
    else:
        return wanted, False
    return replace(
        wanted, first_offset=max(wanted.first_offset, first), end_offset=min(wanted.end_offset, last)
    ), is_exact


def _timestamp(wanted: Wanted, one: Filter, value: object) -> tuple[Wanted, bool]:
    """A timestamp without a zone is left to Spark, which knows the session's zone."""
    is_lower_bound = isinstance(one, GreaterThan | GreaterThanOrEqual | EqualTo | EqualNullSafe)
    if not is_lower_bound or not isinstance(value, datetime) or value.tzinfo is None:
        return wanted, False
    time_ms = (value - _EPOCH) // _MILLISECOND
    if time_ms <= (wanted.min_timestamp_ms or 0):  # records without a timestamp count as older than 1970
        return wanted, False
    return replace(wanted, min_timestamp_ms=time_ms), False


def _values_of(one: Filter, value: object) -> tuple[object, ...] | None:
    if isinstance(one, EqualTo | EqualNullSafe):
        return (value,)
    if isinstance(one, In) and isinstance(value, tuple | list):
        return tuple(value)
    return None


def _interval(one: Filter, value: object) -> tuple[int, int] | None:
    """Returns the inclusive interval of an integer comparison, or None for other filters."""
    if not isinstance(value, int):
        return None
    match one:
        case GreaterThan():
            return value + 1, MAX_OFFSET
        case GreaterThanOrEqual():
            return value, MAX_OFFSET
        case LessThan():
            return 0, value - 1
        case LessThanOrEqual():
            return 0, value
    return None
