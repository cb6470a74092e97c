"""The alarms that are states, in words."""

from __future__ import annotations

from typing import Final

from proxy.admin.alarm import Alarm, Kind

STATES: Final[tuple[Alarm, ...]] = (
    Alarm(
        "copy-lag",
        Kind.TOPIC,
        ("copying is behind by more than half of the retention",),
        (
            "The broker's retention may remove records before they are copied. Half of the total retention counts; if "
            "nothing of the topic may expire, half of the broker's `retention.ms`."
        ),
        "Nothing.",
        (
            "Raise `retention.ms` on the topic first. Then raise the copy quota and "
            "`remote.log.manager.copier.thread.pool.size`, add proxies, or find out why the store is slow."
        ),
    ),
    Alarm(
        "retention-differs",
        Kind.TOPIC,
        ("the total retention in the settings file is not the recorded one",),
        (
            "The file has another `remote.log.retention.*` than the topic, or a total that is shorter than the "
            "broker's retention, which was the total until now. The field `reason` has both."
        ),
        "Expiration of the topic, on the proxies with this file.",
        (
            'Correct the file, or record the total that you want: see "Two retentions" in '
            "[day-to-day.md](day-to-day.md)."
        ),
    ),
    Alarm(
        "broker-retention-50",
        Kind.TOPIC,
        ("records that are not copied have used half of the broker's retention",),
        (
            "The topic has a total retention of its own. Its broker removes these records when they have used all of "
            "the broker's retention, in time or in bytes."
        ),
        "Nothing.",
        "Raise `retention.ms` or `retention.bytes` on the topic. Then find out why copying is late.",
    ),
    Alarm(
        "broker-retention-80",
        Kind.TOPIC,
        ("records that are not copied have used 80 % of the broker's retention",),
        "The topic has a total retention of its own. Its broker soon removes these records.",
        "Nothing.",
        "Raise `retention.ms` or `retention.bytes` on the topic at once. Then find out why copying is late.",
    ),
    Alarm(
        "broker-retention-passed",
        Kind.TOPIC,
        ("records that are not copied are beyond the broker's retention",),
        (
            "The broker may remove these records at any time. They may belong to an import whose CreateTime is older "
            "than the retention."
        ),
        "Nothing.",
        (
            "Raise `retention.ms` on the topic at once, above the age of the oldest imported record, until the "
            "records are copied."
        ),
    ),
    Alarm(
        "copy-stalled",
        Kind.TOPIC,
        ("copying makes no progress",),
        "A copy has work and makes no progress. The field `error` has the reason.",
        (
            "Nothing, but nothing more is copied until the reason is gone. What is copied already is trimmed, and "
            "expires, unless another alarm stops that."
        ),
        "Correct the reason: most often the store or a broker. Copying continues by itself.",
    ),
    Alarm(
        "stage-failing",
        Kind.TOPIC,
        ("a stage of a partition keeps failing",),
        "A stage of the partition's tasks has failed for 45 s. The fields `stage` and `error` say which and why.",
        ("That stage alone. The stage `survey` (metadata, bounds, history) stops all stages of the partition."),
        (
            "Correct the reason. The stage is tried again by itself. If `trim` fails because a copied segment cannot "
            "be read, the brokers still have its records: mount or restore the store, or restore the key, and run "
            "`tidegate tier verify`. If a stage fails because the store lacks the marker `tier.json`, mount it or "
            "correct `[storage]`. If the store has lost the marker, `tidegate tier accept` writes it again."
        ),
    ),
    Alarm(
        "stuck-lso",
        Kind.TOPIC,
        ("the last stable offset stands still",),
        "A transaction hangs.",
        "Nothing, but no record after it can be copied.",
        "Find it with `kafka-transactions.sh find-hanging`, and abort it.",
    ),
    Alarm(
        "uncopied-beginning",
        Kind.TOPIC,
        ("the local log has uncopied records before copied ones",),
        (
            "A broker lost its log start in an unclean stop. It has records again that its retention or an "
            "administrator removed before they were copied."
        ),
        ("Trimming of the partition at these records, until the owner has copied them. Consumers can read them."),
        "Do nothing: the owner copies them. A deletion would remove the remote records before them as well.",
    ),
    Alarm(
        "custom-metadata",
        Kind.TOPIC,
        ("copying stops",),
        "The store returned more custom metadata than `remote.log.metadata.custom.metadata.max.bytes`.",
        "Copying of the partition, until a restart.",
        "Raise the setting, and restart the proxies.",
    ),
    Alarm(
        "metadata-lost",
        Kind.TOPIC,
        ("the metadata of a partition was lost",),
        (
            "The metadata topic lost records of the partition or the topic's tier settings, by what the store has. Or "
            "records are in neither tier, and it is not proved that they were never copied."
        ),
        "Trimming, expiration and deletion of the partition. Copying goes on.",
        'See "A partition stops" in [recovery.md](recovery.md).',
    ),
    Alarm(
        "diverged",
        Kind.TOPIC,
        ("the log diverged from the copied records",),
        (
            "The leader's log has another history than the copied records: a broker was emptied or restored, or the "
            "leader has removed the records where both histories part."
        ),
        (
            "Expiration and deletion of the partition. While the leader's log is shorter than the tier, also copying, "
            "trimming, and DeleteRecords of clients."
        ),
        'See "A partition stops" in [recovery.md](recovery.md).',
    ),
    Alarm(
        "clock-skew",
        Kind.TOPIC,
        ("nothing expires while this machine's clock and the brokers' clock differ",),
        "The clocks differ by more than a minute.",
        "Expiration of the partition.",
        "Synchronize the clocks.",
    ),
    Alarm(
        "future-timestamp",
        Kind.TOPIC,
        ("a timestamp in the future keeps records from expiring",),
        (
            "A record has a timestamp in the future, and its segment was copied longer ago than the total retention "
            "in time. As in Kafka, the segment and all later ones of the partition stay until that time and the "
            "retention have passed."
        ),
        "Expiration of the partition by time. Trimming goes on, and so does expiration by bytes.",
        (
            "Correct the producer. Delete the record and those before it with `kafka-delete-records.sh` through the "
            "proxy, or set a total retention in bytes."
        ),
    ),
    Alarm(
        "topics-missing",
        Kind.TOPIC,
        ("no broker knows a tiered topic any more, and its deletion is not proved",),
        "No broker knows the topic any more.",
        "The deletion of its remote data.",
        'See "Topics that are missing" in [recovery.md](recovery.md).',
    ),
    Alarm(
        "metadata",
        Kind.TIER,
        (
            "the metadata topic must not be used as it is",
            "the remote log metadata is not followed",
            "the remote log metadata of one metadata partition is not followed",
            "a task of the remote log metadata failed",
            "a read of remote log metadata failed",
        ),
        (
            "The metadata topic is lost, lost records, has records of a later release or records that cannot be read, "
            "was not rebuilt to its end, or cannot be written to the state's folder. The line and `/readyz` name the "
            "reason, and the metadata partition if it concerns one alone."
        ),
        (
            "Copying, trimming and expiration, of the partitions of that metadata partition or of all. Clients get "
            "error 9, which they retry, for offsets that the metadata does not know."
        ),
        (
            "Do what the reason says. [recovery.md](recovery.md) has the steps for a lost topic, and "
            "[day-to-day.md](day-to-day.md) those for an upgrade. Keep the folder `state.path` until these steps "
            "remove it: it may be the last copy of the metadata."
        ),
        metric="tidegate_remote_log_metadata_alarm",
    ),
    Alarm(
        "unfit",
        Kind.TIER,
        ("this process cannot work as an owner, and keeps partitions only while no other process can",),
        (
            "The process cannot write its state's or spool's folder, or cannot use the store. The field `probe` says "
            "which, `error` why, and `since` when it began."
        ),
        (
            "Copying, trimming and expiration by this process. The other proxies take its partitions over. If all are "
            "unfit, as a single proxy is, all keep their partitions."
        ),
        (
            "Correct the disk, the credentials or the connection. The process counts as fit after a minute without a "
            "failure. Each relapse doubles this time, up to ten minutes."
        ),
        metric="tidegate_unfit",
    ),
    Alarm(
        "refused-topic",
        Kind.TIER,
        ("a topic cannot be tiered",),
        (
            "A topic cannot be tiered, and has remote records, or the settings name it: by its whole name, or by the "
            "topic's own `remote.storage.enable`. The field `reason` says why. A topic without remote records that "
            "only a pattern matches, such as the compacted topics of an application, raises no alarm: its line has "
            "the level INFO, and `tidegate check` and `tidegate tier topics` list it."
        ),
        "Copying, trimming and expiration of the topic. Its remote records stay readable.",
        "Change the topic, most often its `cleanup.policy`, or remove it from the settings.",
        metric="tidegate_refused_topics",
    ),
    Alarm(
        "store-failing",
        Kind.PROCESS,
        ("the store does not answer",),
        (
            "No call of the store has succeeded for 2 s, or it has refused the credentials for 12 s. The field "
            "`location` names the store, `error` says why. Alarms that follow from it stand below it on the page."
        ),
        (
            "Copying, expiration and deletion. Clients that read the remote tier wait: they get an error that they "
            "retry."
        ),
        "Correct the store, the network or the credentials. Everything goes on by itself.",
    ),
    Alarm(
        "no-broker-answers",
        Kind.PROCESS,
        ("no broker has answered for a minute",),
        "The proxy asks all brokers for the cluster's metadata, and none of them answers. It asks again.",
        (
            "Everything: clients reach no broker, and nothing is copied, trimmed or expired. The sizes of the backlog "
            "are not known. The proxy does not serve, and is not ready."
        ),
        (
            "Check the brokers, their advertised listeners, the network, and the certificate authority in "
            "`[upstream.tls]`."
        ),
        heading="no broker answers",
    ),
    Alarm(
        "proxy-rejected",
        Kind.PROCESS,
        ("the brokers reject the proxy",),
        (
            "The proxy's own credentials in `[upstream.sasl]` are wrong. Only a proxy that already ran has the alarm. "
            "If the brokers reject a proxy at its start, `tidegate serve` ends with exit code 3."
        ),
        "Copying, and answers from the remote tier. The proxy is not ready.",
        "Correct `[upstream.sasl]`, and restart.",
    ),
    Alarm(
        "missing-right",
        Kind.PROCESS,
        ("… lacks …",),
        "The proxy's principal lacks a right that some tasks need.",
        "The tasks that the line names.",
        "Give the right to the principal. `tidegate check` lists all that are missing.",
        heading="the proxy lacks a right that some tasks need",
    ),
    Alarm(
        "listener-not-open",
        Kind.PROCESS,
        ("the listener for broker … cannot be opened",),
        (
            "The port for the broker is taken, also by a program that allows others to share it, is above 65535, or "
            "is `listener.bootstrap.port`. The proxy tries again every `metadata.max.age.ms`."
        ),
        (
            "Clients cannot reach this broker through the proxy. They get the name `broker-N-has-no-listener.invalid` "
            "for it, which has no address. The proxy is not ready."
        ),
        'Free the port, or change `listener.base.port`. Node ids from 65535 on need `listener.brokers.by = "sni"`.',
        heading="the listener for a broker cannot be opened",
    ),
    Alarm(
        "settings-differ",
        Kind.PROCESS,
        ("two proxies of the cluster have different settings",),
        (
            "Another proxy of the cluster has another `[[topics]]` or `[storage]` than this one, for 30 s or longer. "
            "The line names the proxy and the sections."
        ),
        "Nothing. But the owner of a partition goes by its own file: it may leave topics uncopied.",
        "Give all proxies the same `[[topics]]` and `[storage]`, and reload or restart those that you changed.",
    ),
    Alarm(
        "settings-not-reloaded",
        Kind.PROCESS,
        ("the settings are not reloaded, because they are wrong",),
        "The settings file had a mistake at a SIGHUP.",
        "Nothing: the proxy goes on with its old settings.",
        "Correct what the line names, check it with `tidegate check`, and send SIGHUP again.",
    ),
    Alarm(
        "admin-token-unusable",
        Kind.PROCESS,
        ("the changed token of the admin port cannot be used, the old one stays",),
        "The file of `[admin] token.file` is gone, empty, or not one line of ASCII.",
        "Nothing: the last token counts.",
        "Correct the file.",
    ),
    Alarm(
        "certificates-unusable",
        Kind.PROCESS,
        ("changed certificates cannot be used, the old ones stay",),
        "The new files are unreadable, or do not fit together.",
        "Nothing.",
        "Correct the files before the old certificates expire.",
    ),
)
