"""`RecordedProgress`: a `Progress` that keeps every report."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from tiers.access.progress import Progress


@dataclass
class RecordedProgress(Progress):
    bars: list[tuple[str, int | None]] = field(default_factory=list)
    advances: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    milestones: list[str] = field(default_factory=list)

    def bar(self, what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        self.bars.append((what, total))
        return nullcontext(self.advances.append)

    def count(self, what: str, count: Callable[[], int]) -> AbstractContextManager[None]:
        self.bars.append((what, None))
        return nullcontext()

    def say(self, text: str) -> None:
        self.said.append(text)

    def milestone(self, text: str) -> None:
        self.milestones.append(text)
