from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.quota import QuotaWindow, RateQuota, RemoteFetchQuotas, Reservation

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.integers(0, 3000)),
        st.tuples(st.just("reserve"), st.integers(0, 5000)),
        st.tuples(st.just("charge"), st.integers(0, 100)),
    ),
    max_size=60,
)
SECOND = QuotaWindow(1, 1000)


class Clock:
    now_ms = 1_000_000

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
                wait_ms = quota.throttle_ms()
                assert wait_ms > 0
                clock.now_ms += wait_ms - 1
                assert quota.reserve(number) is None
                clock.now_ms += 1
                reservation = quota.reserve(number)
            assert reservation is not None
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


def test_unused_quota_is_released() -> None:
    clock = Clock()
    quota = RateQuota(1000, SECOND, clock)
    for used_bytes in (0, 999):
        reservation = quota.reserve(1000)
        assert reservation is not None
        assert quota.reserve(1) is None
        reservation.used_bytes = used_bytes
        with pytest.raises(ZeroDivisionError), reservation:
            raise ZeroDivisionError
    late = quota.reserve(1)
    assert late is not None
    clock.now_ms += 5000
    late.charge(0)
    assert quota.reserve(1000) is not None
    assert quota.reserve(1) is None, "bytes that are reported late do not count in a later window"


@pytest.mark.parametrize(
    ("limits", "granted", "refused"),
    [
        ({"topic": 100}, [("orders-eu", "a"), ("orders-us", "a"), ("other", "a")], ("orders-eu", "b")),
        ({"per_client": 100, "bytes_per_second": 250}, [("t", "a"), ("t", "b"), ("t", "c")], ("t", "d")),
        ({"per_client": 100}, [("t", "a"), ("t", "b")], ("t", "a")),
    ],
    ids=["each topic of a pattern", "all share one", "each client"],
)
def test_a_read_needs_all_quotas_that_apply(
    limits: dict[str, int], granted: list[tuple[str, str]], refused: tuple[str, str]
) -> None:
    per_topic = [("orders-*", limits.pop("topic", None)), ("*", None)]
    quotas = RemoteFetchQuotas(Clock())
    quotas.change(SECOND, per_topic=per_topic, **limits)
    for topic, client in granted:
        assert quotas.reserve(topic, client, 100) is not None
    assert quotas.reserve(*refused, 100) is None
    assert (quotas.throttled_count, quotas.throttled_ms) == (1, 2000)


def test_clients_that_choose_ever_new_ids_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tiers.quota._CLIENTS_KEPT", 3)
    quotas = RemoteFetchQuotas(Clock())
    quotas.change(SECOND, per_client=100)
    for number in (0, 1, 2, 3, 0):
        assert quotas.reserve("t", str(number), 100) is not None
    assert quotas.reserve("t", "3", 1) is None


def test_a_limit_that_changes_counts_what_was_used() -> None:
    clock = Clock()
    quota = RateQuota(1000, SECOND, clock)
    assert quota.reserve(900) is not None
    for limit, is_granted in ((500, False), (None, True), (500, False)):
        quota.change(limit, SECOND)
        assert (quota.reserve(1_000_000) is not None) is is_granted
    assert quota.throttle_ms() == 2000
