"""Replaces an asynchronous method: its calls fail, or something else happens before or after them."""

from __future__ import annotations

from collections.abc import Callable
from inspect import isawaitable
from typing import Any

import pytest

from tiers.errors import RetriableRemoteStorageError


def refuse(
    patch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    error: Exception | None = None,
    when: Callable[[Any], bool] = lambda first: True,
) -> list[Any]:
    """Lets calls fail, with 503 of a store by default. `when` chooses them by their first argument.

    Returns the first arguments of all calls so far."""
    call, firsts = getattr(owner, name), list[Any]()

    async def refused(*arguments: Any, **options: Any) -> Any:
        firsts.append(arguments[0])
        if when(arguments[0]):
            raise error or RetriableRemoteStorageError("503")
        return await call(*arguments, **options)

    patch.setattr(owner, name, refused)
    return firsts


def before(patch: pytest.MonkeyPatch, owner: object, name: str, happens: Callable[..., Any]) -> None:
    """Lets something happen before each call. It gets the positional arguments of the call."""
    call = getattr(owner, name)

    async def later(*arguments: Any, **options: Any) -> Any:
        if isawaitable(happening := happens(*arguments)):
            await happening
        return await call(*arguments, **options)

    patch.setattr(owner, name, later)


def after(patch: pytest.MonkeyPatch, owner: object, name: str, happens: Callable[..., Any]) -> None:
    """Lets something happen after each call that succeeds, before the caller gets its result."""
    call = getattr(owner, name)

    async def earlier(*arguments: Any, **options: Any) -> Any:
        result = await call(*arguments, **options)
        if isawaitable(happening := happens(*arguments)):
            await happening
        return result

    patch.setattr(owner, name, earlier)
