"""Making frozen values in a third of the time, where a look-up or a rebuild makes one after the other.

A frozen dataclass assigns each of its fields through a call that looks for whether it may. Here a class of the same
slots that is not frozen is filled in, and the object is then given the frozen class: nobody sees it in between. UUID is
frozen likewise, and its constructor checks what 16 bytes cannot fail.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from typing import Any, TypeVar
from uuid import UUID, SafeUUID

_T = TypeVar("_T")


def quick(frozen: type[_T]) -> type[_T]:
    """A constructor of `frozen`, a frozen dataclass with slots and without a `__post_init__`."""
    assert is_dataclass(frozen)

    def become_frozen(value: Any) -> None:
        value.__class__ = frozen

    specified = [
        (each.name, Any, field() if each.default is MISSING else field(default=each.default)) for each in fields(frozen)
    ]
    made: Any = make_dataclass(frozen.__name__, specified, slots=True, namespace={"__post_init__": become_frozen})
    return made  # type: ignore[no-any-return]  # what it makes are instances of `frozen`


@contextmanager
def making_many() -> Iterator[None]:
    """While many values are made that all stay: to look for garbage among them, every so many, finds none and
    takes as long as making them. Not to be held over anything that waits."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_new: Any = object.__new__
_set = object.__setattr__
_UNKNOWN = SafeUUID.unknown


def quick_uuid(raw: bytes) -> UUID:
    """Of 16 bytes."""
    uuid = _new(UUID)
    _set(uuid, "int", int.from_bytes(raw, "big"))
    _set(uuid, "is_safe", _UNKNOWN)
    return uuid  # type: ignore[no-any-return]  # it is one
