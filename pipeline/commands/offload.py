"""`tidegate-pipeline offload`: copies log data from the brokers to the remote tier with many cores."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from pipeline.commands.common import (
    AsJson,
    Conf,
    ConfigFile,
    Master,
    duration_ms,
    findings,
    job_runner,
    regular_expression,
    size_bytes,
)
from pipeline.config import load_pipeline_config
from pipeline.offload.driver import OffloadOptions, OffloadReport, PlannedPartition
from pipeline.offload.job import offload as run_offload
from pipeline.offload.job import offload_rounds, plan_offload
from tiers.commands.console import TERMINAL, say, show_json, show_table

Topics = Annotated[
    str,
    typer.Option("--topics", parser=regular_expression, metavar="REGEX", help="Matches whole names of tiered topics."),
]
MinBytes = Annotated[
    int | None,
    typer.Option(
        "--min-bytes",
        parser=size_bytes,
        metavar="SIZE",
        help="Leaves a partition's tail alone if it is smaller. Default: the size of a segment.",
    ),
]
MaxAge = Annotated[
    int | None,
    typer.Option(
        "--max-age", parser=duration_ms, metavar="TIME", help="Copies a small tail at this age. Default: segment.ms."
    ),
]
MaxBytes = Annotated[
    int | None,
    typer.Option("--max-bytes", parser=size_bytes, metavar="SIZE", help="Ends the run after this many bytes."),
]
MaxRate = Annotated[
    float | None,
    typer.Option("--max-mbps-per-broker", min=0.001, help="Limits the megabytes read from each broker per second."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only shows what would be copied.")]
Once = Annotated[bool, typer.Option("--once", help="Runs once, which is the default.")]
Interval = Annotated[
    int | None,
    typer.Option("--interval", parser=duration_ms, metavar="TIME", help="Repeats runs, with this pause between them."),
]


def offload(
    config: ConfigFile,
    topics: Topics = ".*",
    min_bytes: MinBytes = None,
    max_age: MaxAge = None,
    max_bytes: MaxBytes = None,
    max_mbps_per_broker: MaxRate = None,
    dry_run: DryRun = False,
    once: Once = False,
    interval: Interval = None,
    master: Master = None,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Copies log data from the brokers to the remote tier. It trims nothing, and the proxies do not copy meanwhile.

    SIGINT and SIGTERM end a run without leftovers. With --interval they are the way to end the command."""
    if once and interval is not None:
        raise typer.BadParameter("--once and --interval exclude each other")
    if dry_run and interval is not None:
        raise typer.BadParameter("--dry-run and --interval exclude each other")
    if dry_run and max_bytes is not None:
        raise typer.BadParameter("--dry-run and --max-bytes exclude each other: the plan has all that is to be copied")
    if max_bytes == 0:
        raise typer.BadParameter("--max-bytes: expected at least 1 byte")
    settings = load_pipeline_config(config)
    options = OffloadOptions(
        topics=topics,
        min_bytes=min_bytes,
        max_age_ms=max_age,
        max_bytes=max_bytes,
        max_bytes_per_second_per_broker=None if max_mbps_per_broker is None else int(max_mbps_per_broker * 1e6),
    )
    if dry_run:
        show_plan(plan_offload(settings, options, TERMINAL), as_json)
        return
    try:
        with job_runner(master, conf, "offload") as runner:
            if interval is None:
                report = run_offload(settings, runner, options, TERMINAL)
                show_report(report, as_json)
                findings(report.troubles)
                return
            offload_rounds(
                lambda: bool(plan_offload(settings, options, TERMINAL)),
                lambda: run_offload(settings, runner, options, TERMINAL),
                lambda report: show_report(report, as_json),
                interval / 1000,
                time.sleep,
                say,
            )
    except KeyboardInterrupt:
        if interval is None:
            raise
        say("offload: ended")


_NOTHING = (
    "nothing is to be copied: all that the brokers have is in the remote tier, or it is smaller than a segment and"
    " young (--min-bytes, --max-age)"
)


def show_plan(plan: list[PlannedPartition], as_json: bool) -> None:
    if as_json:
        show_json(plan)
        return
    if not plan:
        say(_NOTHING)
        return
    numbers = ("partition", "from", "to", "bytes", "segments")
    rows = [(one.topic, one.partition, one.first_offset, one.next_offset, one.size_bytes, one.segments) for one in plan]
    show_table(("topic", *numbers), rows, numbers)
    say(f"about {sum(one.size_bytes for one in plan)} bytes in {sum(one.segments for one in plan)} segments")


def show_report(report: OffloadReport, as_json: bool) -> None:
    if as_json:
        show_json(report)
        return
    numbers = ("partition", "from", "to", "segments", "bytes", "left", "lost")
    rows = [
        (
            one.topic,
            one.partition,
            one.first_offset,
            one.next_offset,
            one.segments,
            one.log_bytes,
            one.left_bytes,
            one.lost_attempts,
            one.error or None,
        )
        for one in report.partitions
        if one.segments or one.error
    ]
    if not rows:
        say(_NOTHING)
        return
    show_table(("topic", *numbers, "error"), rows, numbers)
    rate = report.log_bytes / max(report.seconds, 0.001) / 1e6
    say(f"{report.log_bytes} bytes in {report.seconds:.1f} s ({rate:.0f} MB/s), {report.waves} waves")
