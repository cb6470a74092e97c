"""`show_rebuild`: shows the plan and the outcome of a rebuild, for the commands of all programs."""

from __future__ import annotations

import typer

from tiers.commands.console import FINDINGS, say, show_json, show_table
from tiers.model.ids import TopicIdPartition
from tiers.upkeep.rebuild import Rebuild, RebuildOptions
from tiers.upkeep.rebuild_plan import PartitionPlan


def show_rebuild(done: Rebuild, options: RebuildOptions, apply: str, as_json: bool) -> None:
    """Prints the plan and its outcome. `apply` is the name of the option that writes.

    Ends the command with exit code 1 when a partition is undecided, or when a requested write did not happen."""
    if as_json:
        show_json(
            {
                "topic": done.topic,
                "written": done.written,
                "topic_is_empty": not done.taken,
                "is_needed": not done.is_needless,
                "other_clusters": done.other_clusters,
                "partitions": [_as_json(each) for each in done.plans],
            }
        )
    else:
        _print(done)
    if done.undecided:
        say(f"{len(done.undecided)} partitions are undecided")
    if not done.written:
        say(_why_not(done, options, apply))
    if done.undecided or not (done.written or done.is_needless or not options.is_applied):
        raise typer.Exit(FINDINGS)


def _why_not(done: Rebuild, options: RebuildOptions, apply: str) -> str:
    if done.is_needless:
        return (
            f"Nothing needs a rebuild: topic {done.topic} already has the metadata of everything in the store. Nothing"
            " was written."
        )
    if done.taken:
        lacking = sum(done.lacking.values())
        said = f", and lacks records that the store has: {lacking}" if lacking else ""
        return (
            f"Nothing was written: topic {done.topic} is not empty{said}. See 'The metadata topic is lost' in"
            " docs/recovery.md."
        )
    if options.is_applied:
        return "Nothing was written. Use --skip-undecided to write the others."
    return f"Nothing was written. Use {apply} to write into {done.topic}."


def _as_json(plan: PartitionPlan) -> dict[str, object]:
    return {
        "topic": plan.topic_id_partition.topic,
        "topic_id": str(plan.topic_id_partition.topic_id),
        "partition": plan.topic_id_partition.partition,
        "segments": len(plan.segments),
        "read_back": len(plan.unsure),
        "start_offset": min((each.start_offset for each in plan.segments), default=None),
        "end_offset": max((each.valid_end_offset for each in plan.segments), default=None),
        "log_start_offset": plan.log_start_offset if plan.log_starts else None,
        "gaps": [gap._asdict() for gap in sorted(plan.gaps)],
        "dropped": plan.dropped,
        "notes": plan.notes,
        "refused": plan.refused,
    }


def _print(done: Rebuild) -> None:
    headings = ("partition", "segments", "from", "to", "log start", "verdict")
    rows = []
    for plan in done.plans:
        line = _as_json(plan)
        verdict = _verdict(done, plan)
        numbers = (line["segments"], line["start_offset"], line["end_offset"], line["log_start_offset"])
        rows.append((_name(plan.topic_id_partition), *numbers, verdict))
    show_table(headings, rows, headings[1:5])
    for plan in done.plans:
        name = _name(plan.topic_id_partition)
        for kind, sentences in (("refused", plan.refused), ("left out", plan.dropped), ("note", plan.notes)):
            for sentence in sentences:
                typer.echo(f"{name}: {kind}: {sentence}")
    if done.other_clusters:
        typer.echo(f"objects of other clusters were left out: {', '.join(done.other_clusters)}")


def _verdict(done: Rebuild, plan: PartitionPlan) -> str:
    if plan.refused:
        return "UNDECIDED"
    if done.written:
        return "written"
    if not done.taken:
        return "to be written"
    lacking = done.lacking.get(plan.topic_id_partition, 0)
    return f"records not in the metadata: {lacking}" if lacking else "already in the metadata"


def _name(partition: TopicIdPartition) -> str:
    return f"{partition.topic or partition.topic_id}-{partition.partition}"
