"""Prints the results of a drill as a table."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from tests.drill.engine import DrillResult
from tests.drill.faults import FaultKind
from tests.drill.proxy_watch import OWNER_BACK_S
from tests.drill.violations import RULES
from tiers.model.segment_metadata import RemoteLogSegmentState as State

SHOWN = 30


def show(console: Console, result: DrillResult, proxies: int) -> None:
    table = Table(title=f"{proxies} proxies, {result.seconds:.0f} s, seed {result.seed}", show_header=False)
    table.add_column("what")
    table.add_column("how much", justify="right")
    for kind in FaultKind:
        table.add_row(kind, f"{result.faults[kind]:,}")
    table.add_section()
    table.add_row("records produced", f"{result.produced:,}")
    table.add_row("  acknowledged or committed", f"{result.certain:,}")
    table.add_row("  aborted", f"{result.aborted:,}")
    table.add_row("records checked by readers", f"{result.checked:,}")
    table.add_row("passes of readers (interrupted)", f"{result.passes:,} ({result.unfinished_passes:,})")
    table.add_row("longest wait of a reader while proxy and store were up, s", f"{result.longest_wait_s:.1f}")
    table.add_row("DeleteRecords of clients", f"{result.deletions:,}")
    table.add_section()
    table.add_row("segments copied", f"{result.segments[State.COPY_SEGMENT_FINISHED]:,}")
    table.add_row("  begun", f"{result.segments[State.COPY_SEGMENT_STARTED]:,}")
    table.add_row("  finished twice, with equal data", f"{result.duplicates:,}")
    table.add_row("deleted segments, expired or left over", f"{result.segments[State.DELETE_SEGMENT_FINISHED]:,}")
    table.add_row("  with objects written after the deletion", f"{result.left_over:,}")
    table.add_row("offsets trimmed from the broker", f"{result.trimmed_offsets:,}")
    table.add_row("transactions of owners", f"{result.transactions:,}")
    table.add_row("audits", f"{result.audits:,}")
    table.add_row("probes during store outages (slowest, s)", f"{result.probes:,} ({result.slowest_probe_s:.1f})")
    table.add_section()
    for number, gone_s in result.without_owner_s.items():
        quiet_s = result.without_owner_quiet_s[number]
        table.add_row(f"metadata partition {number} without an owner, s", f"{gone_s:.1f}, {quiet_s:.1f} undisturbed")
    table.add_section()
    for rule in RULES:
        if result.rules[rule]:
            table.add_row(rule, f"{result.rules[rule]:,}", style="red")
    table.add_row("violations", f"{sum(result.rules.values()):,}", style="green" if result.has_held else "red")
    table.caption = f"undisturbed: since the last fault began or ended; at most {OWNER_BACK_S:.0f} s"
    console.print(table)
    for violation in result.violations[:SHOWN]:
        console.print(
            f"{violation.at_s:6.1f} s  {violation.rule}: {violation.what}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
