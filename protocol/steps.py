"""Work on a message in steps, so that the caller can do other work in between.

A generator of steps yields after each item of the message: a topic, a partition, a setting, a group or a tagged field.
A step takes microseconds, whatever the message has. The generator returns the result of the work.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator
from itertools import islice
from typing import Generic, ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")

Steps = Generator[None, None, T]


class Walk(Generic[T]):
    """Work in progress."""

    __slots__ = ("_found", "_steps")

    def __init__(self, steps: Steps[T]) -> None:
        self._found: list[T] = []
        self._steps = _kept(steps, self._found)

    def go_on(self, max_steps: int | None = None) -> bool:
        """Takes up to `max_steps` steps; None: all. Returns whether the work is done. Raises what a step raises."""
        deque(islice(self._steps, max_steps), maxlen=0)
        return self.is_done

    @property
    def is_done(self) -> bool:
        return bool(self._found)

    def close(self) -> None:
        """Ends the work, done or not."""
        self._steps.close()

    @property
    def result(self) -> T:
        return self._found[0]


def _kept(steps: Steps[T], found: list[T]) -> Steps[None]:
    found.append((yield from steps))


def finished(steps: Steps[T]) -> T:
    """Takes all steps at once."""
    walk = Walk(steps)
    walk.go_on()
    return walk.result


class Stepped(Generic[P, T]):
    """A function that works in steps. A call takes all steps at once."""

    def __init__(self, steps: Callable[P, Steps[T]]) -> None:
        self.steps = steps
        self.__doc__ = steps.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T:
        return finished(self.steps(*args, **kwargs))
