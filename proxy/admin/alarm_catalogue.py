"""The alarms in words: what each of them means, what Tidegate has stopped, and what to do. docs/alarms.md has them all.

A test holds the names here to those on that page.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple
from urllib.parse import quote


class Alarm(NamedTuple):
    """`title` is the line of the log."""

    title: str
    meaning: str
    stopped: str
    action: str


ALARMS: Final[Mapping[str, Alarm]] = {
    "copy-lag": Alarm(
        "copying is behind by more than half of the retention",
        (
            "The broker's retention may remove records before they are copied. Half of the total retention "
            "counts; if nothing of the topic may expire, half of the broker's retention.ms."
        ),
        "Nothing.",
        (
            "Raise retention.ms on the topic first. Then raise the copy quota and "
            "remote.log.manager.copier.thread.pool.size, add proxies, or find out why the store is slow."
        ),
    ),
    "retention-differs": Alarm(
        "the total retention in the settings file is not the recorded one",
        (
            "The file has another remote.log.retention.* than the topic, or a total that is shorter than the "
            "broker's retention, which was the total until now. The field reason has both."
        ),
        "Expiration of the topic, on the proxies with this file.",
        'Correct the file, or record the total that you want: see "Two retentions" in operations.md.',
    ),
    "broker-retention-50": Alarm(
        "records that are not copied have used half of the broker's retention",
        (
            "The topic has a total retention of its own. Its broker removes these records when they have used all"
            " of the broker's retention, in time or in bytes."
        ),
        "Nothing.",
        "Raise retention.ms or retention.bytes on the topic. Then find out why copying is late.",
    ),
    "broker-retention-80": Alarm(
        "records that are not copied have used 80 % of the broker's retention",
        "The topic has a total retention of its own. Its broker soon removes these records.",
        "Nothing.",
        "Raise retention.ms or retention.bytes on the topic at once. Then find out why copying is late.",
    ),
    "broker-retention-passed": Alarm(
        "records that are not copied are beyond the broker's retention",
        (
            "The broker may remove these records at any time. They may belong to an import whose CreateTime is "
            "older than the retention."
        ),
        "Nothing.",
        (
            "Raise retention.ms on the topic at once, above the age of the oldest imported record, until the "
            "records are copied."
        ),
    ),
    "copy-stalled": Alarm(
        "copying makes no progress",
        "A copy has work and makes no progress. The field error has the reason.",
        (
            "Nothing, but nothing more is copied until the reason is gone. What is copied already is trimmed, and"
            " expires."
        ),
        "Correct the reason: most often the store or a broker. Copying continues by itself.",
    ),
    "stage-failing": Alarm(
        "a stage of a partition keeps failing",
        "A stage of the partition's tasks has failed for 45 s. The fields stage and error say which and why.",
        ("That stage alone. The stage survey (metadata, bounds, manifest, history) stops all stages of the partition."),
        (
            "Correct the reason. The stage is tried again by itself. If trim fails because a copied segment "
            "cannot be read, the brokers still have its records: mount or restore the store, or restore the key, "
            "and run tidegate tier verify."
        ),
    ),
    "stuck-lso": Alarm(
        "the last stable offset stands still",
        "A transaction hangs.",
        "Nothing, but no record after it can be copied.",
        "Find it with kafka-transactions.sh find-hanging, and abort it.",
    ),
    "uncopied-beginning": Alarm(
        "the local log has uncopied records before copied ones",
        (
            "A broker lost its log start in an unclean stop. It has records again that its retention or an "
            "administrator removed before they were copied."
        ),
        (
            "Trimming of the partition at these records, until the total retention has removed them. Consumers "
            "can read them."
        ),
        (
            "If they lie before the offset Rx that tidegate tier bounds shows and are not wanted, delete them "
            "with kafka-delete-records up to Rx. If they lie in a gap, do nothing: a deletion would remove the "
            "remote records before the gap as well."
        ),
    ),
    "custom-metadata": Alarm(
        "copying stops",
        "The store returned more custom metadata than remote.log.metadata.custom.metadata.max.bytes.",
        "Copying of the partition, until a restart.",
        "Raise the setting, and restart the proxies.",
    ),
    "gap": Alarm(
        "the broker removed records before they were copied",
        "Records are lost: the broker's retention or an administrator removed them.",
        "Nothing.",
        'Find out why copying was late. See "Gaps" in operations.md.',
    ),
    "metadata-lost": Alarm(
        "the metadata of a partition was lost",
        (
            "The metadata topic lost records of the partition or the topic's tier settings. Or records are in "
            "neither tier, and the witnesses do not prove that they were never copied. Or the store has neither "
            "the manifest nor the oldest segments of the partition: [storage] may name another place than that of"
            " the other proxies."
        ),
        "Copying, trimming and expiration of the partition.",
        'See "A partition stops" in operations.md.',
    ),
    "diverged": Alarm(
        "the log diverged from the copied records",
        "The leader's log does not continue the copied records: a broker was emptied or restored.",
        "Copying, trimming and expiration of the partition, and DeleteRecords of clients.",
        'See "A partition stops" in operations.md.',
    ),
    "clamped": Alarm(
        "another leader's records replaced copied records",
        "An unclean election replaced the end of the log.",
        "Nothing.",
        "Look at the replaced records with tidegate tier quarantine. Find out why the election was unclean.",
    ),
    "manifest": Alarm(
        "a partition manifest cannot be written or read",
        "The store refuses the manifest, or does not answer.",
        (
            "Trimming of the segments that no stored manifest accepts. If the manifest cannot be read, all "
            "trimming of the partition."
        ),
        "Correct the store: its rights, its quota, its connection. The owner tries again.",
    ),
    "clock-skew": Alarm(
        "nothing expires while this machine's clock and the brokers' clock differ",
        "The clocks differ by more than a minute.",
        "Expiration of the partition, or the recording of missing topics.",
        "Synchronize the clocks.",
    ),
    "topics-missing": Alarm(
        "several tiered topics went missing at about the same time, as after the restore of a KRaft log",
        "No broker knows these topics any more.",
        "The deletion of their remote data.",
        'See "Topics that are missing" in operations.md.',
    ),
    "tidegate_remote_log_metadata_alarm": Alarm(
        "the metadata topic must not be used as it is",
        (
            "The metadata topic is lost, lost records, has records of a later release or records that cannot be "
            "read, was not rebuilt to its end, or cannot be written to the state's folder. The line and /readyz "
            "name the reason, and the metadata partition if it concerns one alone."
        ),
        (
            "Copying, trimming and expiration, of the partitions of that metadata partition or of all. Clients "
            "get error 9, which they retry, for offsets that the metadata does not know."
        ),
        (
            'See "The metadata topic is lost" and "Upgrade" in operations.md. If a task failed, restart the '
            "process, and report the defect."
        ),
    ),
    "tidegate_remote_log_metadata_foreign_records_total": Alarm(
        "foreign records in the remote log metadata topic are skipped",
        "Another program wrote to the metadata topic.",
        "Nothing.",
        "Take WRITE on the topic from all principals except the proxies'.",
    ),
    "tidegate_bounds_violations_total": Alarm(
        "a bound between the tiers does not hold",
        "The two tiers do not fit together.",
        "Nothing.",
        "Run tidegate tier bounds and tidegate tier verify.",
    ),
    "tidegate_remote_fetch_in_neither_tier_total": Alarm(
        "the offset lies above the log start, but neither tier has it",
        "A client asked for a record that is probably lost.",
        "Nothing. The client gets error 9, which it retries.",
        "Run tidegate tier bounds. If the owner found a gap, the client goes on by itself.",
    ),
    "tidegate_unfit": Alarm(
        "this process cannot work as an owner, and asks for no partitions",
        (
            "The process cannot write its state's or spool's folder, or cannot use the store. The field probe "
            "says which, error why, and since when it began."
        ),
        (
            "Copying, trimming and expiration by this process. The other proxies take its partitions over. If all"
            " are unfit, all keep their partitions."
        ),
        (
            "Correct the disk, the credentials or the connection. The process counts as fit after a minute "
            "without a failure. Each relapse doubles this time, up to ten minutes."
        ),
    ),
    "tidegate_refused_topics": Alarm(
        "a topic cannot be tiered",
        "The settings name a topic that cannot be tiered. The field reason says why.",
        "The topic is not tiered.",
        "Change the topic, most often its cleanup.policy, or remove it from the settings.",
    ),
}
"""By the label `reason` of `tidegate_remote_log_alarms_total`, or by the metric."""


def runbook_of(alarm: str) -> str:
    """Returns the address of the page about an alarm, which the proxy itself serves."""
    return f"/runbook/{quote(alarm, safe='')}"
