"""Shows the demo's progress while segments move: a live table on a terminal, otherwise one line every two seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

LINE_EVERY_S = 2.0
BAR_CELLS = 40
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class PartitionTiers:
    """The offsets of one partition: the broker's log is `[local_start, end)`, the remote tier `[0, remote_end)`."""

    partition: int
    end: int
    local_start: int
    remote_end: int

    @property
    def moved(self) -> float:
        """The share of the offsets that the broker no longer has."""
        return self.local_start / self.end if self.end else 0.0

    def bar(self) -> Text:
        """Returns a bar of three parts: offsets in the remote tier only, in both tiers, and on the broker only."""
        if not self.end:
            return Text("·" * BAR_CELLS, style="dim")
        remote_only = round(BAR_CELLS * self.local_start / self.end)
        copied = max(remote_only, round(BAR_CELLS * min(self.remote_end, self.end) / self.end))
        return Text.assemble(
            ("█" * remote_only, "cyan"),
            ("▓" * (copied - remote_only), "yellow"),
            ("░" * (BAR_CELLS - copied), "green"),
        )


@dataclass(frozen=True, slots=True)
class TierState:
    partitions: list[PartitionTiers]
    broker_bytes: int
    tier_bytes: int
    segments: int

    @property
    def least_moved(self) -> float:
        return min((each.moved for each in self.partitions), default=0.0)


def folder_bytes(folder: Path, pattern: str) -> tuple[int, int]:
    """Returns the number and the total size of the files that match. Files that vanish meanwhile do not count."""
    count = total = 0
    for path in folder.rglob(pattern):
        try:
            total += path.stat().st_size
        except FileNotFoundError:
            continue
        count += 1
    return count, total


def table_of(state: TierState) -> Table:
    table = Table(expand=False)
    table.add_column("partition")
    table.add_column("remote only · both · broker only")
    for title in ("broker's log start", "in remote tier", "end", "moved"):
        table.add_column(title, justify="right")
    for each in state.partitions:
        numbers = (f"{each.local_start:,}", f"{each.remote_end:,}", f"{each.end:,}", f"{each.moved:.0%}")
        table.add_row(str(each.partition), each.bar(), *numbers)
    return table


def line_of(state: TierState) -> str:
    moved = " ".join(f"{each.moved:4.0%}" for each in state.partitions)
    return (
        f"broker {state.broker_bytes / MIB:6.1f} MiB · remote tier {state.tier_bytes / MIB:6.1f} MiB in "
        f"{state.segments:3} segments · below the broker's log start, by partition: {moved}"
    )


class TierView:
    """A context manager that shows progress. Call `show()` for every change."""

    def __init__(self, console: Console, elapsed_s: Callable[[], float]) -> None:
        self._console = console
        self._elapsed_s = elapsed_s
        self._live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._last_line_s = float("-inf")

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, state: TierState, doing: str, *, always: bool = False) -> None:
        heading = f"{self._elapsed_s():5.1f} s  {doing}"
        if self._live is not None:
            self._live.update(Group(Text(heading, style="bold"), table_of(state), Text(line_of(state))))
        elif always or time.monotonic() - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = time.monotonic()
            self._console.print(f"{heading} · {line_of(state)}", highlight=False, soft_wrap=True)
