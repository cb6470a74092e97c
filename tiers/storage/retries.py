"""`with_retries` repeats a call of a store while its error is retriable.

`CredentialsRenewal` reads the credentials of a store again after a refusal, and repeats the refused call once. Another
program may renew credentials at any time: a rotated secret in a file, a new token, a Kerberos ticket. The store refuses
the former ones then. A refusal may also have another cause, which new credentials do not mend, so they are read again
at most every `PAUSE_MS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from tiers.errors import CredentialsRefusedError, RemoteStorageError
from tiers.storage.circuit_breaker import loop_ms

T = TypeVar("T")

_ATTEMPTS = 5
FIRST_PAUSE_MS = 100
PAUSE_MS: Final = 20_000


async def with_retries(
    call: Callable[[], Awaitable[T]],
    pause_ms: int = FIRST_PAUSE_MS,
    repeated: type[RemoteStorageError] = RemoteStorageError,
) -> T:
    """Repeats a call a few times while its error is retriable and of the class `repeated`. Raises the last error."""
    for attempt in range(_ATTEMPTS):
        try:
            return await call()
        except repeated as error:
            if not error.retriable or attempt == _ATTEMPTS - 1:
                raise
        await asyncio.sleep((pause_ms << attempt) / 1000)
    raise AssertionError("unreachable")


class CredentialsRenewal:
    """It belongs to one event loop. `renew` reads the credentials again; it raises `ValueError` if it cannot."""

    def __init__(self, renew: Callable[[], Awaitable[None]], clock_ms: Callable[[], int] = loop_ms) -> None:
        self._renew = renew
        self._clock_ms = clock_ms
        self._renewing = asyncio.Lock()
        self._renewals = 0
        self._again_at_ms: int | None = None

    async def tried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `call`. Raises its error, which is that of the second time if it was repeated."""
        renewals = self._renewals
        try:
            return await call()
        except CredentialsRefusedError as refusal:
            async with self._renewing:
                if renewals == self._renewals:  # no other call has renewed them meanwhile
                    if self._again_at_ms is not None and self._clock_ms() < self._again_at_ms:
                        raise
                    self._again_at_ms = self._clock_ms() + PAUSE_MS
                    try:
                        await self._renew()
                    except ValueError:
                        raise refusal from None
                    self._renewals += 1
        return await call()
