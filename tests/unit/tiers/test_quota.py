from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.quota import QuotaWindow, RateQuota, RemoteFetchQuotas, Reservation, reserve_all

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 3000)),
        st.tuples(st.just("reserve"), st.integers(0, 5000)),
        st.tuples(st.just("charge"), st.integers(0, 100)),
    ),
    max_size=60,
)


class Clock:
    def __init__(self) -> None:
        self.now_ms = 1_000_000

    def __call__(self) -> int:
        return self.now_ms


@given(
    steps=STEPS,
    limit=st.integers(1, 3000),
    window=st.builds(QuotaWindow, st.integers(1, 11), st.integers(1, 1500)),
)
def test_no_window_holds_more_than_the_limit_and_one_reservation(
    steps: list[tuple[str, int]], limit: int, window: QuotaWindow
) -> None:
    clock = Clock()
    quota = RateQuota(limit, window, clock)
    moved: list[list[int]] = []
    open_reservations: list[tuple[Reservation, list[int]]] = []
    for step, number in steps:
        if step == "wait":
            clock.now_ms += number
        elif step == "reserve":
            reservation = quota.reserve(number)
            if reservation is None:
                assert quota.throttle_ms() > 0
            else:
                moved.append([clock.now_ms, number])
                open_reservations.append((reservation, moved[-1]))
        elif open_reservations:
            reservation, entry = open_reservations.pop(0)
            entry[1] = entry[1] * number // 100
            reservation.charge(entry[1])
    allowed = limit * window.length_ms / 1000
    for start_ms, _ in moved:
        within = [size for at_ms, size in moved if start_ms <= at_ms <= start_ms + window.length_ms]
        assert sum(within) < allowed + max(within) or sum(within) == 0


@given(steps=STEPS, limit=st.integers(1, 3000))
def test_a_throttled_read_may_continue_after_the_stated_time(steps: list[tuple[str, int]], limit: int) -> None:
    clock = Clock()
    quota = RateQuota(limit, QuotaWindow(3, 100), clock)
    for step, number in steps:
        if step == "wait":
            clock.now_ms += number // 10
        elif step == "reserve" and quota.reserve(number) is None:
            wait_ms = quota.throttle_ms()
            assert wait_ms > 0
            clock.now_ms += wait_ms - 1
            assert quota.reserve(number) is None
            clock.now_ms += 1
            assert quota.reserve(number) is not None


def test_many_tasks_at_once_overshoot_by_one_reservation_at_most() -> None:
    quota = RateQuota(1000, QuotaWindow(1, 1000), Clock())
    granted = [quota.reserve(600) for _ in range(50)]
    assert sum(one is not None for one in granted) == 2


def test_unused_quota_is_released() -> None:
    quota = RateQuota(1000, QuotaWindow(1, 1000), Clock())
    reservation = quota.reserve(1000)
    assert reservation is not None
    assert quota.reserve(1) is None
    with pytest.raises(ZeroDivisionError), reservation:
        raise ZeroDivisionError
    second = quota.reserve(1000)
    assert second is not None
    with second:
        second.used_bytes = 999
    assert quota.reserve(1) is not None
    assert quota.reserve(1) is None


def test_bytes_that_are_reported_late_do_not_count_in_a_later_window() -> None:
    clock = Clock()
    quota = RateQuota(1000, QuotaWindow(1, 1000), clock)
    late = quota.reserve(1000)
    assert late is not None
    clock.now_ms += 5000
    late.charge(0)
    assert quota.reserve(1000) is not None
    assert quota.reserve(1) is None


def test_all_quotas_are_reserved_or_none() -> None:
    clock = Clock()
    wide, narrow = (RateQuota(limit, QuotaWindow(1, 1000), clock) for limit in (1000, 10))
    assert reserve_all([wide, narrow], 500) is not None
    assert reserve_all([wide, narrow], 500) is None
    assert wide.reserve(500) is not None
    assert wide.reserve(1) is None


def fetch_quotas(clock: Clock, **limits: int) -> RemoteFetchQuotas:
    return RemoteFetchQuotas(
        clock,
        window=QuotaWindow(1, 1000),
        bytes_per_second=limits.get("whole"),
        per_client=limits.get("client"),
        per_topic=[("orders-*", limits.get("topic")), ("*", None)],
    )


def test_each_topic_of_a_pattern_has_a_quota_of_its_own() -> None:
    quotas = fetch_quotas(Clock(), topic=100)
    assert quotas.reserve("orders-eu", "a", 100) is not None
    assert quotas.reserve("orders-eu", "b", 1) is None
    assert quotas.reserve("orders-us", "a", 100) is not None
    assert quotas.reserve("other", "a", 100) is not None
    assert (quotas.throttled_count, quotas.throttled_ms) == (1, 2000)


def test_each_client_has_a_quota_of_its_own_and_all_share_one() -> None:
    quotas = fetch_quotas(Clock(), client=100, whole=250)
    assert quotas.reserve("t", "a", 100) is not None
    assert quotas.reserve("t", "a", 100) is None
    assert quotas.reserve("t", "b", 100) is not None
    assert quotas.reserve("t", "c", 100) is not None
    assert quotas.reserve("t", "d", 100) is None


def test_clients_that_choose_ever_new_ids_take_no_more_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.quota._CLIENTS_KEPT", 3)
    clock = Clock()
    quotas = fetch_quotas(clock, client=100)
    for number in range(10):
        assert quotas.reserve("t", str(number), 100) is not None
    assert len(quotas._of_clients) == 3
    clock.now_ms += 10_000
    assert quotas.reserve("t", "new", 100) is not None
    assert len(quotas._of_clients) == 1


def test_without_limits_nothing_is_ever_throttled() -> None:
    quotas = RemoteFetchQuotas(Clock())
    assert all(quotas.reserve("t", "a", 1 << 40) is not None for _ in range(100))


def test_a_limit_that_changes_counts_what_was_used() -> None:
    now_ms = 0
    quota = RateQuota(1000, QuotaWindow(1, 1000), lambda: now_ms)
    assert quota.reserve(900) is not None
    quota.change(500, QuotaWindow(1, 1000))
    assert quota.reserve(1) is None
    quota.change(None, QuotaWindow(1, 1000))
    assert quota.reserve(1_000_000) is not None
    quota.change(500, QuotaWindow(1, 1000))
    assert quota.throttle_ms() == 2000
    now_ms = 2000
    assert quota.reserve(1) is not None
