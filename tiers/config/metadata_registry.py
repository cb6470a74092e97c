"""Creates the log of the remote log metadata: the metadata topic, or a log of the group's entry points.

Third parties may add entry points to the group `tidegate.remote_log_metadata_manager`."""

from __future__ import annotations

from collections.abc import Mapping

from tiers.broker.client import BrokerClient
from tiers.config.class_loading import load_class
from tiers.config.manager_settings import METADATA_PREFIX, explain_unknown
from tiers.config.settings import TOPIC_BASED
from tiers.metadata.metadata_log import MetadataLog
from tiers.metadata.record_log import MetadataRecordLog, MetadataRecordLogFactory
from tiers.metadata.single_writer_log import SingleWriterLog
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.storage.settings import UnknownSettingError

ENTRY_POINT_GROUP = "tidegate.remote_log_metadata_manager"


def create_record_log(name: str, settings: Mapping[str, str]) -> MetadataRecordLog:
    """Returns a log that is not yet open. `name` is that of an entry point, or `module:Class`.

    Raises `ValueError` when there is no such log, or when it rejects its settings."""
    factory: MetadataRecordLogFactory = load_class(ENTRY_POINT_GROUP, name, "remote log metadata manager", TOPIC_BASED)
    if not callable(getattr(factory, "create", None)):
        raise ValueError(f"{name!r} is not a remote log metadata manager: it has no class method `create`")
    try:
        return factory.create(settings)
    except UnknownSettingError as error:
        raise ValueError(explain_unknown(error, METADATA_PREFIX)) from error


def create_metadata_log(
    name: str, settings: Mapping[str, str], common: TopicBasedSettings, client: BrokerClient, cluster_id: str
) -> MetadataLog:
    """Returns a log that is not yet open. `name` is `topic_based`, or as in `create_record_log`.

    `settings` are those of the named log, and `common` those that Tidegate knows. The caller keeps and closes the
    client. Metadata of another cluster than `cluster_id` is not used. Raises `ValueError` as `create_record_log`."""
    if name == TOPIC_BASED:
        return TopicBasedMetadataLog(client, common)
    return SingleWriterLog(create_record_log(name, settings), common.state_folder, cluster_id, common.refusal_to_create)
