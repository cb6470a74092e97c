"""`Backoff` is the pause before a retry."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubles with each failure in a row, from `base_ms` up to `cap_ms`, with full jitter.

    So clients whose requests failed together do not retry together."""

    base_ms: int
    cap_ms: int

    def most_ms(self, failures: int) -> int:
        """Returns the longest pause after `failures` failures in a row, at least one."""
        return min(self.cap_ms, self.base_ms << min(failures - 1, 20))

    def pause_ms(self, failures: int, jitter: Callable[[], float] = random.random) -> float:
        """Returns a pause after `failures` failures in a row, at least one. `jitter` returns a number in `[0, 1)`."""
        return self.most_ms(failures) * jitter()
