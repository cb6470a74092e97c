"""`Progress`: how code that takes long tells a person how far it is. A command shows it, and a test records it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Protocol


class Progress(Protocol):
    def bar(self, what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        """Yields the function to call with each advance. `total` is None if it is not known."""

    def count(self, what: str, count: Callable[[], int]) -> AbstractContextManager[None]:
        """Shows what `count` returns while the block runs. Another thread calls `count`."""

    def say(self, text: str) -> None:
        """Shows a message of one line."""

    def milestone(self, text: str) -> None:
        """Shows a line where no bar is visible, such as in the log of a long run."""


class Silence:
    """A `Progress` that shows nothing."""

    def bar(self, what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        return nullcontext(lambda advance: None)

    def count(self, what: str, count: Callable[[], int]) -> AbstractContextManager[None]:
        return nullcontext()

    def say(self, text: str) -> None:
        return None

    def milestone(self, text: str) -> None:
        return None


SILENCE: Final = Silence()
