"""`TierWork`: the work on a topic's remote tier that an operator can pause, and the settings that pause it.

* The settings are part of the topic's own tier settings, so every proxy sees them, and they survive restarts.
* The file has no such keys: a pause belongs to the cluster, and not to the process whose file says so.
* docs/operations.md, "Pause a topic", says what each pause stops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final


class TierWork(StrEnum):
    COPYING = "copying"
    TRIMMING = "trimming"
    EXPIRING = "expiring"
    READING = "reading"

    @property
    def key(self) -> str:
        """The tier setting that pauses this work."""
        return f"remote.log.{self.value}.paused"


NOTHING_PAUSED: Final[frozenset[TierWork]] = frozenset()
PAUSE_KEYS: Final = tuple(work.key for work in TierWork)


def paused_work(config: Mapping[str, str]) -> frozenset[TierWork]:
    """Returns the paused work by a topic's own tier settings."""
    if not config:
        return NOTHING_PAUSED
    return frozenset(work for work in TierWork if config.get(work.key) == "true")


def resume_command(topic: str, work: Iterable[TierWork]) -> str:
    """Returns the command that ends the pause of this work."""
    return f"tidegate tier resume {topic} {' '.join(f'--{each.value}' for each in sorted(work))} --yes"
