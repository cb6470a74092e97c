"""The options of the demos."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from bench.demo import SMALLEST_MIB, size_mib


@pytest.mark.parametrize("text", ["-5", "0", str(SMALLEST_MIB - 1), "many"])
def test_too_small_a_demo_is_refused_with_the_smallest_size(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"^expected a number of MiB from {SMALLEST_MIB} on, not {text!r}$"):
        size_mib(text)
    assert size_mib(str(SMALLEST_MIB)) == SMALLEST_MIB
