"""`S3Credentials`: the credentials of an S3 store, from its settings or as the AWS SDK finds them.

The SDK renews credentials that have an end, and keeps all others. So after a refusal the whole chain of its sources is
asked again. Both clients of the store sign with the result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, TypeVar

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import get_session
from botocore.exceptions import BotoCoreError, ClientError

from tiers.errors import CredentialsRefusedError, ThrottledError
from tiers.storage.retries import CredentialsRenewal, with_retries

T = TypeVar("T")

SETTINGS: Final = "`access.key.id` and `secret.access.key`"


class S3Credentials(AioCredentials):  # type: ignore[misc]  # aiobotocore has no types
    """The component `credential_provider` of an aiobotocore session, and the credentials that it provides."""

    def __init__(self, read: Callable[[], Mapping[str, str]], timeout_s: float) -> None:
        """`read` returns the settings of the store, with the contents of files. `timeout_s` bounds a renewal."""
        super().__init__("", "")  # never used: the client signs by `get_frozen_credentials`
        self._read = read
        self._timeout_s = timeout_s
        self._current: Any = None
        self._renewal = CredentialsRenewal(self._renew)

    @property
    def _source(self) -> str:
        return self._current.method if self._current.method == SETTINGS else f"the SDK's source {self._current.method}"

    async def load_credentials(self) -> S3Credentials:
        self._current = await self._load()
        return self

    async def get_frozen_credentials(self) -> Any:
        return None if self._current is None else await self._current.get_frozen_credentials()

    async def tried(self, call: Callable[[], Awaitable[T]]) -> T:
        """Returns the result of `call`, which is repeated with other credentials if the store refuses them.

        It is also repeated while the store throttles: a copy takes many requests, and one error ends it."""
        try:
            return await self._renewal.tried(lambda: with_retries(call, repeated=ThrottledError))
        except CredentialsRefusedError as error:
            if self._current is None:  # the message says that there are none
                raise
            raise CredentialsRefusedError(f"{error}; the credentials come from {self._source}") from error

    async def _renew(self) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                self._current = await self._load()
        except (BotoCoreError, ClientError, OSError) as error:
            raise ValueError(str(error)) from error

    async def _load(self) -> Any:
        values = self._read()
        if values["access.key.id"]:
            return AioCredentials(values["access.key.id"], values["secret.access.key"], method=SETTINGS)
        return await get_session().get_credentials()
