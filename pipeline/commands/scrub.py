"""`tidegate-pipeline scrub`: checks that every object of the tier is intact, and that the store holds nothing else."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
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
)
from pipeline.config import load_pipeline_config
from pipeline.maintenance.scrub import ScrubOptions
from pipeline.maintenance.scrub import scrub as scrub_job
from pipeline.maintenance.scrub_report import ScrubLevel, ScrubReport
from pipeline.maintenance.usage import DAY_MS
from tiers.commands.console import TERMINAL, say, show_json, show_table


def scrub(
    config: ConfigFile,
    level: Annotated[
        ScrubLevel,
        typer.Option("--level", help="meta compares records with objects, batch reads all, deep decodes all too."),
    ] = ScrubLevel.BATCH,
    topics: Annotated[
        str | None,
        typer.Option(
            "--topics", parser=regular_expression, metavar="REGEX", help="Matches whole names. Default: everything."
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", help="A file that notes intact segments. A later run skips them.")
    ] = None,
    grace: Annotated[
        int,
        typer.Option(
            "--grace",
            parser=duration_ms,
            metavar="TIME",
            show_default="24h",
            help="Ignores younger objects without a record.",
        ),
    ] = DAY_MS,
    delete_orphans: Annotated[
        bool, typer.Option("--delete-orphans", help="Shows which objects without a record would be deleted.")
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="With --delete-orphans: deletes them.")] = False,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Compares the store with the metadata and reads it back. Exit code 1 means that something is wrong."""
    if apply and not delete_orphans:
        raise typer.BadParameter("--apply goes with --delete-orphans")
    if resume is not None and level is ScrubLevel.META:
        raise typer.BadParameter("--resume needs --level batch or deep: meta reads no segment")
    settings = load_pipeline_config(config)
    options = ScrubOptions(level, topics, grace, delete_orphans and apply, resume)
    with job_runner(master, conf, "scrub") as runner:
        report = asyncio.run(scrub_job(settings, runner, options, TERMINAL))
    if as_json:
        show_json(asdict(report))
    else:
        _print(report)
    if delete_orphans and not apply:
        what = f"{report.deletable_segments} segments would be deleted and {report.deletable_uploads} uploads aborted"
        say(f"Nothing was deleted. With --apply, {what}.")
    if delete_orphans and apply:
        say(f"{report.deleted_segments} segments were deleted, {report.aborted_uploads} uploads aborted.")
    findings(report.findings)


def _print(report: ScrubReport) -> None:
    if report.findings:
        headings = ("finding", "partition", "segment or object", "from", "to", "position", "bytes", "what is wrong")
        rows = [
            (
                each.kind,
                None if each.topic is None else f"{each.topic}-{each.partition}",
                each.object or each.segment,
                each.first_offset,
                each.last_offset,
                each.position,
                each.size_bytes,
                each.what,
            )
            for each in report.findings
        ]
        show_table(headings, rows, ("from", "to", "position", "bytes"))
    if report.inner_gaps:
        lacking = sum(each.missing_offsets for each in report.inner_gaps)
        typer.echo(
            f"{len(report.inner_gaps)} segments have no records for {lacking} of their offsets, which may be legitimate"
        )
    if report.young_orphans:
        typer.echo(f"{report.young_orphans} objects without a record are younger than the grace period")
    if report.outdated:
        typer.echo(f"{report.outdated} verdicts were dropped: their segments were replaced or deleted meanwhile")
    if report.other_clusters:
        typer.echo(f"{report.other_clusters} objects belong to other clusters and were skipped")
    typer.echo(f"{report.partitions} partitions, {report.objects} objects with {report.stored_bytes} bytes were listed")
    if report.level is not ScrubLevel.META:
        before = f", {report.already_scrubbed} were read by earlier runs" if report.already_scrubbed else ""
        typer.echo(
            f"{report.segments} segments with {report.log_bytes} log bytes, {report.batches} batches and "
            f"{report.records} records were read back{before}"
        )
    typer.echo(f"{len(report.findings) or 'no'} findings")
