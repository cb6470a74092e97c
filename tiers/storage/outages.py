"""`StoreOutage`: whether a store answers no call of this process, since when, and why. There is one per location.

It logs one line when the outage begins and one when it ends. So the failures that follow from it need no lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from tiers.errors import (
    CredentialsRefusedError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
    StoreOverloadedError,
    reason_of,
)

logger = logging.getLogger(__name__)

BEGINS_AFTER_MS: Final = 2_000
HANGS_AFTER_MS: Final = 4_000
REFUSED_AFTER_MS: Final = 12_000
"""The same for refused credentials. They may have some rights, and the probe of an owner then succeeds in part."""


class StoreOutage:
    """The calls of one process at one store. `location` is empty for the store of `[storage]` itself.

    An outage begins with the second failure in a row, `BEGINS_AFTER_MS` after the first one. A success ends it."""

    def __init__(self, location: str, clock_ms: Callable[[], int]) -> None:
        self.location = location
        self.reason = ""
        """Why the last call failed, in few words."""
        self._clock_ms = clock_ms
        self._failing_since_ms: int | None = None
        self._is_begun = False

    @property
    def lasting_ms(self) -> int | None:
        """How long the store has answered no call; None: it answers."""
        if self._failing_since_ms is None or not self._is_begun:
            return None
        return self._clock_ms() - self._failing_since_ms

    def answered(self) -> None:
        if self._is_begun:
            logger.info("the store answers again", extra={"location": self.location or "home"})
        self._failing_since_ms, self._is_begun = None, False

    def given_up(self, after_ms: int) -> None:
        """Notes a call whose caller waits no more. After a short time, that says nothing about the store."""
        if after_ms >= HANGS_AFTER_MS:
            self.failed(StoreOverloadedError(f"no answer in {after_ms // 1000} s"))

    def failed(self, error: RemoteStorageError) -> None:
        """Notes a failed call. An error about one object is an answer or says nothing."""
        if isinstance(error, RemoteResourceNotFoundError):
            self.answered()
            return
        is_refused = isinstance(error, CredentialsRefusedError)
        if not (error.retriable or is_refused):
            return
        now_ms = self._clock_ms()
        self.reason = reason_of(error)
        if self._failing_since_ms is None:
            self._failing_since_ms = now_ms
        failing_ms = now_ms - self._failing_since_ms
        if not self._is_begun and failing_ms >= (REFUSED_AFTER_MS if is_refused else BEGINS_AFTER_MS):
            self._is_begun = True
            fields = {"location": self.location or "home", "error": self.reason, "since_ms": failing_ms}
            logger.error("the store does not answer", extra=fields)


class StoreOutages:
    """The outages of the stores of one process."""

    def __init__(self, stores: Sequence[StoreOutage] = ()) -> None:
        self._stores = stores

    def now(self) -> list[StoreOutage]:
        """Returns those that last now."""
        return [each for each in self._stores if each.lasting_ms is not None]
