"""`tidegate tier cut`: voids the remote records from an offset on, because the leader's log has others there.

An owner records such a CUT by itself where the leader's log parts from the tier (docs/design.md, safety rule 2). It
needs an operator in two cases:

* A broker was emptied or restored, and its log is shorter than the tier. The owner has stopped the partition.
* The leader has removed the records where its log parts from the tier. The owner has cut the tier at the start of the
  leader's log. Nothing expires until an operator names the offset.

The command needs no ownership. Void records stay in the store until the total retention has passed since the CUT. The
CUT is valid for the leader epoch that the command shows: if another leader comes before the write, the command fails.

The command is idempotent: if nothing would change, it says so, writes nothing, and ends with exit code 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from proxy.commands.tier.bounds import PartitionBounds, partition_bounds, show_bounds
from proxy.commands.tier.tools import parse_partition, run_command
from proxy.config import TidegateConfig, load_config
from tiers.access.open_tier import TIMEOUT_MS, RemoteTierError, UnknownTargetError, metadata_to_now, tiered_cluster
from tiers.commands.console import TERMINAL, AsJson, ConfigFile, say, show_json
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.segment_metadata import Cut, RemoteLogSegmentState, after_cuts
from tiers.tasks.history.align import (
    Parting,
    find_parting,
    require_later_than_copies,
    require_later_than_cuts,
    unsettled_cuts,
)


class VoidRecords(NamedTuple):
    """The records that become void. If two segments have an offset, `offsets` counts it twice."""

    segments: int
    offsets: int
    size_bytes: int


class NamedCut(NamedTuple):
    """The partition's bounds, where the leader's log parts from the tier, and what the command writes and voids.

    `is_needed` False: nothing would change, and nothing was written."""

    bounds: PartitionBounds
    leader_epoch: int
    parting: Parting | None
    cuts: list[Cut]
    void: VoidRecords
    is_needed: bool


def cut(
    config: ConfigFile,
    partition: Annotated[str, typer.Argument(metavar="TOPIC:PARTITION")],
    offset: Annotated[int, typer.Argument(min=0, help="The first offset whose remote records are void.")],
    yes: Annotated[bool, typer.Option("--yes", "--apply", help="Write. Without it, nothing is written.")] = False,
    as_json: AsJson = False,
) -> None:
    """Voids remote records from an offset on.

    The partition has the alarm diverged: the leader's log has other records than the tier.

    The owner goes on with the leader's log from that offset on. The void records stay in the store until the total
    retention has passed. First try to restore the broker's log."""
    topic, number = parse_partition(partition)
    settings = load_config(config)
    found = run_command(lambda: cut_partition(settings, topic, number, offset, yes))
    if as_json:
        changes = {
            "leader_epoch": found.leader_epoch,
            "parting": None if found.parting is None else found.parting._asdict(),
            "cuts": [{"leader_epoch": each.leader_epoch, "offset": each.offset} for each in found.cuts],
            "void": found.void._asdict(),
        }
        show_json(found.bounds.as_json() | changes | {"needed": found.is_needed, "written": yes and found.is_needed})
    else:
        _show(found, f"{topic}-{number}", offset)
    if not found.is_needed:
        say(f"{topic}-{number}: nothing to cut from offset {offset} on. Nothing was written.")
    elif yes:
        say("The CUT was written. The owner continues with this partition in its next round.")
    else:
        say("Nothing was written. Use --yes to write.")


def _show(found: NamedCut, name: str, offset: int) -> None:
    show_bounds([found.bounds])
    if found.parting is None:
        typer.echo(f"{name}: the leader of epoch {found.leader_epoch} shows no other records than the tier")
    else:
        proof = "" if found.parting.is_proved else ", and shows no record before that"
        if found.parting.is_ambiguous:
            proof = ", but its epochs do not prove that"
        typer.echo(
            f"{name}: the leader of epoch {found.leader_epoch} has other records than the tier from offset"
            f" {found.parting.offset} on{proof}"
        )
    if not found.cuts:
        return
    epochs = " and ".join(str(each.leader_epoch) for each in found.cuts)
    typer.echo(
        f"{name}: a CUT at offset {offset} in leader epoch {epochs} voids {found.void.offsets} offsets in"
        f" {found.void.segments} segments with {found.void.size_bytes} bytes. They stay in the store until the total"
        " retention has passed since then"
    )
    local_start = found.bounds.local_log_start
    if found.void.offsets and local_start is not None and offset < local_start:
        typer.echo(f"{name}: the leader's log begins at offset {local_start}, and lacks the records below it")


async def cut_partition(config: TidegateConfig, topic: str, number: int, offset: int, write: bool) -> NamedCut:
    """Records the CUT when `write` is true and something changes.

    Raises `RemoteTierError` with a message of one line."""
    async with tiered_cluster(config) as (client, cluster):
        known = cluster.topics.get(topic)
        if known is None or number not in known.partitions:
            raise UnknownTargetError(f"the cluster has no partition {topic}:{number}")
        partition = TopicIdPartition(known.topic_id, number, topic)
        async with metadata_to_now(config, client, progress=TERMINAL) as log:
            if not log.state.is_known(partition):
                raise RemoteTierError(f"{topic} is not tiered: the metadata has no record of {topic}:{number}")
            source = BrokerLogSource(client)
            shown = await partition_bounds(source, cluster, log.state, partition)
            if shown.trouble:
                raise RemoteTierError(f"{topic}:{number}: {shown.trouble}")
            bounds = await source.bounds(partition, TIMEOUT_MS)
            require_later_than_cuts(log.state, partition, bounds.leader_epoch)
            parting = await find_parting(source, log.state, partition, bounds, TIMEOUT_MS)
            cuts = named_cuts(log.state, partition, bounds, offset, parting)
            void = void_records(log.state, partition, cuts)
            is_settled = not any(each.offset >= offset for each in unsettled_cuts(log.state, partition))
            is_needed = void.segments > 0 or not is_settled
            if write and is_needed:
                now = await source.bounds(partition, TIMEOUT_MS)
                if now.leader_epoch != bounds.leader_epoch:
                    raise RemoteTierError(f"{topic}:{number} has another leader now: run the command again")
                for each in cuts:
                    await RemoteLogMetadataManager(log).put_named_cut(partition, each)
            return NamedCut(shown, bounds.leader_epoch, parting, cuts, void, is_needed)


def named_cuts(
    metadata: RemoteLogMetadataState,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    offset: int,
    parting: Parting | None,
) -> list[Cut]:
    """Returns the CUTs to write at `offset`; none while the leader's log continues the tier, and every CUT is proved.

    A CUT that is not proved gets the offset: a later leader epoch would void the copies that were made since."""
    unsettled = [each for each in unsettled_cuts(metadata, partition) if each.offset >= offset]
    cuts = {each.leader_epoch: each._replace(offset=offset, is_proved=True) for each in unsettled}
    if parting is not None:
        require_later_than_copies(metadata, partition, parting.offset, bounds.leader_epoch)
        cuts[bounds.leader_epoch] = Cut(bounds.leader_epoch, offset, 0)
    return list(cuts.values())


def void_records(metadata: RemoteLogMetadataState, partition: TopicIdPartition, cuts: Sequence[Cut]) -> VoidRecords:
    """Returns what `cuts` void of the copied records and of the attempts."""
    after = [*metadata.cuts(partition), *cuts]
    segments, offsets, size_bytes = 0, 0, 0
    for segment in metadata.list_remote_log_segments(partition):
        kept_to = max(after_cuts(segment, after).valid_end_offset, segment.start_offset - 1)
        count = segment.valid_end_offset - kept_to
        if segment.state is not RemoteLogSegmentState.DELETE_SEGMENT_STARTED and count > 0:
            segments, offsets, size_bytes = segments + 1, offsets + count, size_bytes + segment.segment_size_bytes
    return VoidRecords(segments, offsets, size_bytes)
