"""`tidegate tier orphans`: lists objects that the metadata does not know, and objects that the store lacks.

Without `--delete --yes` the command deletes nothing. With it, the command deletes those of the listed objects that may
be deleted (`tiers.upkeep.orphans`). It also lists unfinished uploads, and aborts those that are old enough.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Annotated

import typer

from proxy.commands.tier.tools import run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import open_tier
from tiers.commands.console import FINDINGS, TERMINAL, AsJson, ConfigFile, say, show_json, show_table, time_text
from tiers.commands.quantities import duration_ms
from tiers.upkeep.orphans import OrphanReport, delete_orphans, find_orphans


def orphans(
    config: ConfigFile,
    grace: Annotated[
        int,
        typer.Option(
            "--grace",
            parser=duration_ms,
            metavar="DURATION",
            show_default="24h",
            help="Younger objects are listed, but never deleted.",
        ),
    ] = 86_400_000,
    delete: Annotated[bool, typer.Option("--delete", help="Shows how much --yes would delete.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="With --delete: deletes the objects that may be deleted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists unknown and missing objects of the store.

    Compares the store with the metadata. Also lists uploads that did not finish. --delete --yes deletes the unknown
    segments, and aborts the uploads, that the list marks with "may be deleted". Exit code 1: there are findings left.
    """
    settings = load_config(config)
    if yes and not delete:
        raise typer.BadParameter("--yes needs --delete")
    report = run_command(lambda: _report(settings, grace, delete and yes))
    if as_json:
        lines = [
            {key: value for key, value in asdict(each).items() if key not in ("custom_metadata", "upload")}
            for each in report.orphans
        ]
        counts = {"other_clusters": report.other_clusters, "deleted": report.deleted, "aborted": report.aborted}
        show_json({"orphans": lines, **counts})
    else:
        _print(report)
    segments, uploads = _count(report)
    if delete and not yes:
        say(f"Nothing was deleted. --yes would delete {segments} segments and abort {uploads} uploads.")
    if delete and yes:
        say(f"{report.deleted} segments were deleted and {report.aborted} uploads aborted.")
    is_done = delete and yes and (report.deleted, report.aborted) == (segments, uploads)
    if any(not each.deletable for each in report.orphans) or (report.orphans and not is_done):
        raise typer.Exit(FINDINGS)


def _count(report: OrphanReport) -> tuple[int, int]:
    """Returns how many segments may be deleted, and how many uploads may be aborted."""
    deletable = [each for each in report.orphans if each.deletable]
    segments = {each.segment for each in deletable if each.upload is None}
    return len(segments), sum(each.upload is not None for each in deletable)


def _print(report: OrphanReport) -> None:
    if report.orphans:
        headings = ("object", "bytes", "written", "what it is", "may be deleted")
        rows = [
            (each.key, each.size_bytes, time_text(each.modified_ms), each.what, "yes" if each.deletable else "no")
            for each in report.orphans
        ]
        show_table(headings, rows, ("bytes",))
    else:
        typer.echo("no orphans: the metadata knows every object, and the store has every known object")
    if report.other_clusters:
        typer.echo(f"{report.other_clusters} objects of other clusters were skipped")


async def _report(config: TidegateConfig, grace_ms: int, delete: bool) -> OrphanReport:
    async with open_tier(config, TERMINAL) as tier:
        report = await find_orphans(tier, time.time_ns() // 1_000_000 - grace_ms, grace_ms)
        if delete:
            await delete_orphans(tier, report)
        return report
