"""Gathers the facts of one partition from outside its owner: from the brokers, the store, the group and the metadata.

The owner's own state (its errors, when a copy is due, the quota) is not known there. What the store and the leader show
stands for it. A store or a leader that does not answer becomes a remark, and the rest is still explained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiers.broker.client import BrokerClient
from tiers.broker.share_groups import ClusterShareGroups
from tiers.config.topic_policy import Refusal, TopicConfig, TopicPolicy, managed_rule, policy_of
from tiers.errors import BrokerError, LogDivergedError, RemoteLogError, RemoteLogMetadataError, RemoteStorageError
from tiers.explain.facts import LocalFacts, OwnerFacts, PartitionFacts
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.topic.group.assignor import differing
from tiers.metadata.topic.group.group_members import OwnerMember
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogSource
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.uncopied import estimated_bytes
from tiers.tasks.history.acceptance import may_be_in_doubt
from tiers.tasks.history.align import align
from tiers.tasks.history.stored_facts import StoredFacts
from tiers.two_tier_log import TwoTierLog


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What all partitions of an explanation share. `members` is None if the group cannot be described."""

    client: BrokerClient
    source: LogSource
    share_groups: ClusterShareGroups
    log: TopicBasedMetadataLog
    cluster_id: str
    visible_after_ms: int
    members: Sequence[OwnerMember] | None
    timeout_ms: int
    remarks: tuple[str, ...] = field(default=())
    settings: str = ""
    """Digests of the settings that all proxies need the same."""
    storage: RemoteStorageManager | None = None
    """None: the store cannot be used."""


def policy_from(
    partition: TopicIdPartition,
    partition_count: int,
    rules: Sequence[TopicConfig],
    own: Mapping[str, str],
    config: Mapping[str, str] | None,
) -> TopicPolicy | Refusal | None:
    """Returns the policy by which an owner manages the topic, the reason why it cannot, or None: nothing tiers it.

    `own` has the topic's tier settings, and `config` the broker's values of `BROKER_KEYS`."""
    rule = managed_rule(partition.topic, rules, own)
    if rule is None:
        return None
    if config is None:
        return Refusal(partition.topic, "the brokers do not tell its configuration")
    return policy_of(partition.topic, partition.topic_id, partition_count, rule, config, own)


async def gather(
    around: Surroundings,
    partition: TopicIdPartition,
    policy: TopicPolicy | Refusal | None,
    stored: StoredFacts | str,
    now_ms: int,
) -> PartitionFacts:
    """Asks the leader of the partition, and adds what the metadata knows.

    `stored` was read before the metadata. A text says why the store does not answer."""
    log, is_tiered = around.log, isinstance(policy, TopicPolicy)
    remarks = [*around.remarks, *([stored] if isinstance(stored, str) else [])]
    remote = RemoteLog(log.state, partition)
    trouble, local, stopped, doubt = "", None, "", ""
    try:
        bounds = await around.source.bounds(partition, around.timeout_ms)
        local = await _local_facts(around, remote, bounds, remarks)

        async def read(_: TopicIdPartition) -> LocalLogBounds:
            return bounds

        tiers = TwoTierLog(log, around.source, read, max_age_ms=0, timeout_ms=around.timeout_ms)
        for first, following in await tiers.unknown_offsets(partition):
            remarks.append(f"Neither tier has the offsets {first} to {following - 1}.")
        parting = await align(around.source, log.state, partition, bounds, around.timeout_ms)
        if parting is not None:
            remarks.append(
                f"The leader has other records from offset {parting.offset} on: the owner cuts the tier there."
            )
        if is_tiered and around.storage is not None and not isinstance(stored, str):
            log_start = remote.log_start(bounds.log_start_offset)
            is_in_doubt = await may_be_in_doubt(log, bounds, log_start, stored, around.timeout_ms)
            doubt = "the metadata, the store and the leader do not agree" if is_in_doubt else ""
    except LogDivergedError as error:
        stopped = str(error)
    except BrokerError as error:
        trouble = str(error)
    except (RemoteStorageError, RemoteLogMetadataError) as error:
        remarks.append(f"The facts in the store cannot be read: {error}.")
    since_ms = remote.copy_failing_since_ms(now_ms)
    if since_ms is not None:
        remarks.append(f"An attempt at the next copy was left {max(0, now_ms - since_ms) // 1000} s ago.")
    owner = _owner(around, partition, remarks) if is_tiered else OwnerFacts("")
    return PartitionFacts(
        remote,
        now_ms,
        policy,
        local=local,
        local_trouble=trouble,
        owner=replace(owner, stopped=stopped, doubt=doubt),
        visible_after_ms=around.visible_after_ms,
        cluster_id=around.cluster_id,
        remarks=tuple(remarks),
    )


async def _local_facts(
    around: Surroundings, remote: RemoteLog, bounds: LocalLogBounds, remarks: list[str]
) -> LocalFacts:
    partition, timeout_ms = remote.partition, around.timeout_ms
    share_start = await lowest_share_start(around.share_groups, partition, timeout_ms, remarks)
    uncopied_bytes = estimated_bytes(remote.metadata, partition, bounds.high_watermark - remote.first_uncopied(bounds))
    if uncopied_bytes is None:
        uncopied_bytes = await around.source.size_bytes(partition, timeout_ms)
    return LocalFacts(bounds, share_start, uncopied_bytes or 0)


async def lowest_share_start(
    share_groups: ClusterShareGroups, partition: TopicIdPartition, timeout_ms: int, remarks: list[str]
) -> int | None:
    """Returns None if no share group reads the partition, and also, with a remark, if that is not known."""
    try:
        return await share_groups.lowest_start(partition, timeout_ms)
    except RemoteLogError as error:
        remarks.append(f"It is not known whether a share group reads the partition: {error}.")
        return None


def _owner(around: Surroundings, partition: TopicIdPartition, remarks: list[str]) -> OwnerFacts:
    if around.members is None:
        return OwnerFacts()
    number = around.log.metadata_partition(partition)
    owner = next((each for each in around.members if number in each.metadata_partitions), None)
    if owner is None:
        remarks.append("No running process owns the partition: nothing is copied, trimmed or expired.")
        return OwnerFacts("")
    if names := differing(around.settings, owner.settings):
        remarks.append(f"The owner has another {names} than this file, so it may not tier the topic as below.")
    unfit = "" if owner.is_fit else "it cannot write its disk or use the store (alarm `unfit`)"
    return OwnerFacts(owner.name, unfit=unfit)
