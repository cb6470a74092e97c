"""`tidegate-pipeline rebuild`: rebuilds the metadata topic from the store, or `.indexes` from `.log` objects."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from pipeline.commands.common import AsJson, Conf, ConfigFile, Master, findings, job_runner, regular_expression
from pipeline.config import load_pipeline_config
from pipeline.maintenance.indexes_task import IndexesResult, Verdict
from pipeline.maintenance.rebuild import rebuild as rebuild_job
from pipeline.maintenance.rebuild import rebuild_indexes
from tiers.commands.console import TERMINAL, say, show_json, show_table
from tiers.commands.rebuild_report import show_rebuild
from tiers.upkeep.rebuild import RebuildOptions


def rebuild(
    config: ConfigFile,
    indexes_only: Annotated[
        bool, typer.Option("--indexes-only", help="Rebuilds missing or damaged .indexes objects from .log objects.")
    ] = False,
    topics: Annotated[
        str | None,
        typer.Option(
            "--topics", parser=regular_expression, metavar="REGEX", help="Matches whole names; for --indexes-only."
        ),
    ] = None,
    into: Annotated[
        str | None, typer.Option("--into", help="The metadata topic to write. Default: the configured one.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", help="The cluster id of the objects. Default: this cluster.")
    ] = None,
    skip_undecided: Annotated[bool, typer.Option("--skip-undecided", help="Writes only what can be decided.")] = False,
    with_unknown_topics: Annotated[
        bool,
        typer.Option(
            "--with-unknown-topics",
            help="Also writes topics that the cluster lacks. Owners delete them after `tidegate tier delete-missing`.",
        ),
    ] = False,
    apply: Annotated[bool, typer.Option("--apply", help="Without it the command writes nothing.")] = False,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Rebuilds metadata or indexes from the objects in the store. Without --apply it only shows the plan."""
    if topics is not None and not indexes_only:
        raise typer.BadParameter("--topics needs --indexes-only: the metadata is rebuilt of all topics")
    if indexes_only and (into or cluster or skip_undecided or with_unknown_topics):
        raise typer.BadParameter(
            "--indexes-only excludes --into, --cluster, --skip-undecided and --with-unknown-topics"
        )
    settings = load_pipeline_config(config)
    with job_runner(master, conf, "rebuild") as runner:
        if not indexes_only:
            options = RebuildOptions(into, cluster, apply, skip_undecided, with_unknown_topics)
            done = asyncio.run(rebuild_job(settings, runner, options, TERMINAL))
        else:
            results = asyncio.run(
                rebuild_indexes(settings, runner, topics or ".*", is_applied=apply, progress=TERMINAL)
            )
    if indexes_only:
        _show_indexes(results, apply, as_json)
    else:
        show_rebuild(done, options, "--apply", as_json)


def _show_indexes(results: list[IndexesResult], is_applied: bool, as_json: bool) -> None:
    found = [each for each in results if each.verdict is not Verdict.WHOLE]
    lines = [
        {
            "topic": each.segment.topic_id_partition.topic,
            "partition": each.segment.topic_id_partition.partition,
            "from": each.segment.start_offset,
            "to": each.segment.end_offset,
            "segment": str(each.segment.segment_id.id),
            "verdict": str(each.verdict),
            "what": each.what,
        }
        for each in found
    ]
    if as_json:
        show_json({"applied": is_applied, "whole": len(results) - len(found), "segments": lines})
    else:
        headings = ("topic", "partition", "from", "to", "segment", "verdict", "what")
        show_table(headings, (list(line.values()) for line in lines), headings[1:4])
        said = "lacked them" if is_applied else "lack them"
        say(f"{len(results) - len(found)} segments have intact indexes, {len(found)} {said}")
        if not is_applied and found:
            say("Nothing was written: --apply writes the indexes.")
    findings(any(each.verdict is not Verdict.WRITTEN for each in found))
