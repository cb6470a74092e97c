"""`tidegate-pipeline merge`: merges small adjacent segments into larger ones."""

from __future__ import annotations

import asyncio
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
from pipeline.maintenance.merge import DEFAULT_GRACE_MS, Merge, plan_merge
from pipeline.maintenance.merge import merge as merge_job
from pipeline.maintenance.merge_plan import MergeGroup, MergeLimits
from tiers.commands.console import TERMINAL, say, show_json, show_table

_DEFAULTS = MergeLimits()


def merge(
    config: ConfigFile,
    topics: Annotated[
        str, typer.Option("--topics", parser=regular_expression, metavar="REGEX", help="Matches whole topic names.")
    ] = ".*",
    below: Annotated[
        int,
        typer.Option(
            "--below", parser=size_bytes, metavar="SIZE", show_default="64MiB", help="Only merges smaller segments."
        ),
    ] = _DEFAULTS.below_bytes,
    target: Annotated[
        int,
        typer.Option(
            "--target", parser=size_bytes, metavar="SIZE", show_default="512MiB", help="Limit of a merged segment."
        ),
    ] = _DEFAULTS.target_bytes,
    grace: Annotated[
        int,
        typer.Option(
            "--grace",
            parser=duration_ms,
            metavar="TIME",
            show_default="1m",
            help="How long the merged parts stay for readers that still use them.",
        ),
    ] = DEFAULT_GRACE_MS,
    apply: Annotated[bool, typer.Option("--apply", help="Without it the command changes nothing.")] = False,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Merges small adjacent segments. Without --apply it only shows what it would merge."""
    settings, limits = load_pipeline_config(config), MergeLimits(below, target)
    if apply:
        with job_runner(master, conf, "merge") as runner:
            done = asyncio.run(merge_job(settings, runner, topics, limits, grace, TERMINAL))
    else:
        done = asyncio.run(plan_merge(settings, topics, limits, TERMINAL))
    if as_json:
        show_json(_as_json(done))
    else:
        _print(done)
    findings(done.failed or done.purge.failed)


def _line(group: MergeGroup) -> dict[str, object]:
    return {
        "topic": group.partition.topic,
        "partition": group.partition.partition,
        "from": group.parts[0].start_offset,
        "to": group.parts[-1].end_offset,
        "segments": len(group.parts),
        "bytes": group.size_bytes,
    }


def _as_json(done: Merge) -> dict[str, object]:
    failed = {id(group): error for group, error in done.failed}
    return {
        "applied": done.is_applied,
        "merged_segments": len(done.merged),
        "deleted_segments": len(done.purge.deleted),
        "groups": [_line(group) | {"error": failed.get(id(group))} for group in done.planned],
        "not_deleted": [
            {"segment": str(segment.segment_id.id), "error": error} for segment, error in done.purge.failed
        ],
    }


def _print(done: Merge) -> None:
    failed = {id(group): error for group, error in done.failed}
    headings = ("topic", "partition", "from", "to", "segments", "bytes")
    rows = [(*_line(group).values(), failed.get(id(group))) for group in done.planned]
    show_table((*headings, "error"), rows, headings[1:])
    for segment, error in done.purge.failed:
        typer.echo(f"segment {segment.segment_id.id} is merged, but it is not deleted yet: {error}")
    parts = sum(len(group.parts) for group in done.planned)
    if done.is_applied:
        say(f"{len(done.merged)} segments merged, {len(done.purge.deleted)} deleted")
    else:
        say(f"{parts} segments would become {len(done.planned)}. Nothing was changed: --apply merges them.")
