"""`tidegate-pipeline retain`: deletes at once what retention has expired, or what deleted topics left."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
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
from pipeline.maintenance.retain import PartitionRetention, Retention, plan_retention
from pipeline.maintenance.retain import retain as retain_job
from tiers.commands.console import TERMINAL, say, show_json, show_table
from tiers.model.ids import TopicIdPartition


def retain(
    config: ConfigFile,
    topics: Annotated[
        str | None,
        typer.Option(
            "--topics", parser=regular_expression, metavar="REGEX", help="Matches whole names of tiered topics."
        ),
    ] = None,
    deleted_topics: Annotated[bool, typer.Option("--deleted-topics", help="Handles deleted topics instead.")] = False,
    delay: Annotated[
        int | None,
        typer.Option(
            "--delay",
            parser=duration_ms,
            metavar="TIME",
            help="How long brokers must not know a deleted topic. Default: remote.log.topic.deletion.delay.ms.",
        ),
    ] = None,
    apply: Annotated[bool, typer.Option("--apply", help="Without it the command deletes nothing.")] = False,
    as_json: AsJson = False,
    master: Master = None,
    conf: Conf = None,
) -> None:
    """Deletes what the proxies would expire, with many cores. Without --apply it only shows it."""
    if (topics is None) != deleted_topics:
        raise typer.BadParameter("give either --topics or --deleted-topics")
    if delay is not None and not deleted_topics:
        raise typer.BadParameter("--delay goes with --deleted-topics")
    settings = load_pipeline_config(config)
    if apply:
        with job_runner(master, conf, "retain") as runner:
            done = asyncio.run(
                retain_job(
                    settings,
                    runner,
                    topics or "",
                    deleted_topics=deleted_topics,
                    delay_ms=delay,
                    progress=TERMINAL,
                )
            )
    else:
        done = asyncio.run(plan_retention(settings, topics or "", deleted_topics=deleted_topics, progress=TERMINAL))
    if as_json:
        partitions = [_line(each) for each in done.partitions]
        topics_left = {"doubtful": _topics(done.doubtful), "unproved": _topics(done.unproved)}
        show_json({"applied": done.is_applied, "partitions": partitions, **topics_left})
    else:
        _print(done)
    findings(done.has_findings)


def _line(one: PartitionRetention) -> dict[str, object]:
    return {
        "topic": one.partition.topic,
        "partition": one.partition.partition,
        "log_start_offset": one.log_start_offset,
        "segments": len(one.segments),
        "bytes": one.size_bytes,
        "deleted": None if one.purge is None else len(one.purge.deleted),
        "error": one.error,
        "not_deleted": []
        if one.purge is None
        else [{"segment": str(segment.segment_id.id), "error": error} for segment, error in one.purge.failed],
    }


def _topics(partitions: Iterable[TopicIdPartition]) -> list[str]:
    return sorted({f"{each.topic} ({each.topic_id})" for each in partitions})


def _print(done: Retention) -> None:
    headings = ("topic", "partition", "log start", "segments", "bytes", "deleted", "error")
    show_table(headings, (list(_line(each).values())[:-1] for each in done.partitions), headings[1:6])
    for one in done.partitions:
        for segment, error in one.purge.failed if one.purge is not None else ():
            typer.echo(f"segment {segment.segment_id.id} is not deleted yet: {error}")
    for topic in _topics(done.doubtful):
        say(f"topic {topic}: brokers do not agree whether it exists, or refuse to say: nothing of it is deleted")
    for topic in _topics(done.unproved):
        say(
            f"topic {topic}: no broker knows it, and its deletion is not proved: nothing of it is deleted here, see"
            " `tidegate tier delete-missing`"
        )
    if not done.is_applied:
        count = sum(len(each.segments) for each in done.partitions)
        say(f"{count} segments would be deleted. Nothing was deleted: --apply deletes them.")
