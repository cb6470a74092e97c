"""The pause before a retry doubles up to a cap, with full jitter."""

import pytest

from tiers.backoff import Backoff


@pytest.mark.parametrize(("failures", "most_ms"), [(1, 50), (2, 100), (5, 800), (6, 1000), (1_000_000, 1000)])
def test_a_pause_is_a_part_of_a_doubled_one(failures: int, most_ms: int) -> None:
    backoff = Backoff(base_ms=50, cap_ms=1000)
    assert backoff.most_ms(failures) == most_ms
    assert backoff.pause_ms(failures, lambda: 0.5) == most_ms / 2
