"""`Progress`: how code that takes long tells a person how far it is. A command shows it, and a test records it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final


class Progress:
    """Shows nothing. Its subclasses do."""

    def bar(self, what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        """Yields the function to call with each advance. `total` is None if it is not known."""
        return nullcontext(lambda advance: None)

    def count(self, what: str, count: Callable[[], int]) -> AbstractContextManager[None]:
        """Shows what `count` returns while the block runs. Another thread calls `count`."""
        return nullcontext()

    def say(self, text: str) -> None:
        """Shows a message of one line."""

    def milestone(self, text: str) -> None:
        """Shows a line where no bar is visible, such as in the log of a long run."""


SILENCE: Final = Progress()
