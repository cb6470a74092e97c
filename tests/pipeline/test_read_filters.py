"""A pushed filter selects exactly Spark's own rows. Spark applies the filters that are not pushed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from pipeline.source.pushed_filters import push

OFFSET, PARTITION, TOPIC, TIMESTAMP = ("offset",), ("partition",), ("topic",), ("timestamp",)


def test_offset_partition_and_topic_are_exact() -> None:
    wanted, residual = push(
        [
            IsNotNull(OFFSET),
            GreaterThanOrEqual(OFFSET, 100),
            LessThan(OFFSET, 200),
            In(PARTITION, (0, 2)),
            EqualTo(TOPIC, "orders"),
            StringStartsWith(TOPIC, "ord"),
        ]
    )
    assert residual == []
    assert (wanted.first_offset, wanted.end_offset) == (100, 199)
    assert [wanted.has("orders", number) for number in range(4)] == [True, False, True, False]
    assert not wanted.has("payments", 0)
    wanted, residual = push([GreaterThan(OFFSET, 9), LessThanOrEqual(OFFSET, 20)])
    assert (wanted.first_offset, wanted.end_offset, residual) == (10, 20, [])


def test_a_time_only_skips_and_spark_looks_again() -> None:
    at = datetime(2026, 1, 2, tzinfo=UTC)
    filters: list[Filter] = [GreaterThan(TIMESTAMP, at), LessThan(TIMESTAMP, at), IsNotNull(TIMESTAMP)]
    wanted, residual = push(filters)
    assert residual == filters[:2]
    assert wanted.min_timestamp_ms == int(at.timestamp() * 1000)
    assert push([GreaterThan(TIMESTAMP, datetime(2026, 1, 2))])[0].min_timestamp_ms is None
    assert push([GreaterThan(TIMESTAMP, datetime(1969, 1, 2, tzinfo=UTC))])[0].min_timestamp_ms is None


def test_filters_that_are_not_understood_stay_with_spark() -> None:
    filters: list[Filter] = [
        Not(EqualTo(OFFSET, 5)),
        IsNull(("key",)),
        IsNotNull(("value",)),
        EqualTo(("value",), b"x"),
        StringContains(TOPIC, "x"),
        EqualNullSafe(OFFSET, None),
        In(OFFSET, (1, 5)),
    ]
    wanted, residual = push(filters)
    assert residual == filters
    assert (wanted.first_offset, wanted.end_offset) == (1, 5)


Judge = Callable[[int], bool]


def _comparison(kind: int, value: int) -> tuple[Filter, Judge]:
    filters: list[tuple[Filter, Judge]] = [
        (EqualTo(OFFSET, value), lambda offset: offset == value),
        (GreaterThan(OFFSET, value), lambda offset: offset > value),
        (GreaterThanOrEqual(OFFSET, value), lambda offset: offset >= value),
        (LessThan(OFFSET, value), lambda offset: offset < value),
        (LessThanOrEqual(OFFSET, value), lambda offset: offset <= value),
        (In(OFFSET, (value, value + 1)), lambda offset: offset in (value, value + 1)),
        (In(OFFSET, (value, value + 3)), lambda offset: offset in (value, value + 3)),
    ]
    return filters[kind]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(-2, 22)), max_size=5))
def test_pushed_and_residual_together_are_the_filters(shapes: list[tuple[int, int]]) -> None:
    pairs = [_comparison(kind, value) for kind, value in shapes]
    wanted, residual = push([one for one, _ in pairs])
    left = [judge for one, judge in pairs if any(one is each for each in residual)]
    for offset in range(25):
        expected = all(judge(offset) for _, judge in pairs)
        by_plan = wanted.first_offset <= offset <= wanted.end_offset
        assert (by_plan and all(judge(offset) for judge in left)) == expected
