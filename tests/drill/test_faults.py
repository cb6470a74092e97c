"""The plan of a drill is repeatable by its seed, and never hits all proxies at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.drill.faults import FaultKind, plan

SEEDS = st.integers(0, 1 << 32)
PROXIES = st.integers(2, 9)


@given(seed=SEEDS, proxies=PROXIES, seconds=st.floats(30, 900))
def test_the_same_seed_makes_the_same_plan(seed: int, proxies: int, seconds: float) -> None:
    assert plan(seed, seconds, proxies) == plan(seed, seconds, proxies)


@given(seed=SEEDS, proxies=PROXIES)
def test_a_proxy_is_always_left_and_none_is_hit_twice_at_once(seed: int, proxies: int) -> None:
    faults = plan(seed, 600, proxies)
    for fault in faults:
        during = [one for one in faults if one.at_s <= fault.at_s <= one.at_s + one.duration_s and one.proxy >= 0]
        hit = [one.proxy for one in during]
        assert len(hit) == len(set(hit)) < proxies


@given(seed=SEEDS, proxies=PROXIES)
def test_ten_minutes_have_all_faults_and_spare_a_shared_broker(seed: int, proxies: int) -> None:
    faults = plan(seed, 600, proxies)
    assert len(faults) >= 600 / 25
    assert [fault.at_s for fault in faults] == sorted(fault.at_s for fault in faults)
    assert {FaultKind.PROXY_KILL, FaultKind.PROXY_FREEZE} <= {fault.kind for fault in faults}
    alone = plan(seed, 600, proxies, with_broker=False)
    assert FaultKind.BROKER_STALL not in {fault.kind for fault in alone}


@given(seed=SEEDS, proxies=PROXIES)
def test_the_faults_of_store_and_broker_take_turns(seed: int, proxies: int) -> None:
    """A purely random choice leaves out a kind in some of the drills."""
    kinds = [fault.kind for fault in plan(seed, 300, proxies)]
    counts = [kinds.count(one) for one in (FaultKind.STORE_FREEZE, FaultKind.STORE_KILL, FaultKind.BROKER_STALL)]
    assert max(counts) - min(counts) <= 1
