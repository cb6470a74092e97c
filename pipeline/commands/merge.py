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
    findings,
    job_runner,
    regular_expression,
    size_bytes,
)
from pipeline.config import load_pipeline_config
from pipeline.maintenance.merge import Merge, plan_merge
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
    apply: Annotated[bool, typer.Option("--apply", help="Without it the command changes nothing.")] = False,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Merges small adjacent segments. Without --apply it only shows what it would merge."""
    settings, limits = load_pipeline_config(config), MergeLimits(below, target)
    if apply:
        with job_runner(master, conf, "merge") as runner:
            done = asyncio.run(merge_job(settings, runner, topics, limits, TERMINAL))
    else:
        done = asyncio.run(plan_merge(settings, topics, limits, TERMINAL))
    if as_json:
        show_json(_as_json(done))
    else:
        _print(done)
    findings(done.failed)


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
        "replaced_segments": len(done.replaced),
        "groups": [_line(group) | {"error": failed.get(id(group))} for group in done.planned],
    }


def _print(done: Merge) -> None:
    failed = {id(group): error for group, error in done.failed}
    headings = ("topic", "partition", "from", "to", "segments", "bytes")
    rows = [(*_line(group).values(), failed.get(id(group))) for group in done.planned]
    show_table((*headings, "error"), rows, headings[1:])
    parts = sum(len(group.parts) for group in done.planned)
    if done.is_applied:
        say(f"{len(done.merged)} segments replace {len(done.replaced)}, which the proxies delete")
    else:
        say(f"{parts} segments would become {len(done.planned)}. Nothing was changed: --apply merges them.")
