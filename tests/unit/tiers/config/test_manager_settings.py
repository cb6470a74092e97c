"""The keys of docs/founding.md that choose the managers and that go to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.examples import install_example
from tests.support.proxy.parsed_config import parse_config
from tiers.access.open_tier import RemoteTierError, tiered_cluster
from tiers.broker.client import BrokerClient
from tiers.config.managers import create_metadata_log, create_record_log, create_remote_storage_manager
from tiers.config.tier_config import ConfigError
from tiers.metadata.single_writer_log import SingleWriterLog
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
from tiers.storage.local import LocalRemoteStorageManager

UPSTREAM = "[upstream]\nbootstrap.servers = 'a:1'\n"
LOCAL = "remote.log.storage.manager.class.name = 'local'\n"
SQLITE = "remote.log.metadata.manager.class.name = 'sqlite'\n"


@pytest.mark.parametrize(
    ("text", "is_tiered", "settings"),
    [
        (
            LOCAL + "remote.log.storage.path = '/tier'\nremote.log.storage.fsync = false\n" + UPSTREAM,
            True,
            {"path": "/tier", "fsync": "false"},
        ),
        (
            LOCAL + "remote.log.storage.enable = false\nremote.log.storage.path = '/tier'\n" + UPSTREAM,
            False,
            {"path": "/tier"},
        ),
        ("remote.log.storage.path = '/t'\n" + UPSTREAM + "[storage]\nimplementation = 'local'\n", True, {"path": "/t"}),
    ],
    ids=["founding keys alone", "a key of our own", "the section and founding keys"],
)
def test_founding_keys_go_to_the_storage_manager(text: str, is_tiered: bool, settings: dict[str, str]) -> None:
    config = parse_config(text)
    assert config.storage is not None
    assert (config.storage.implementation, config.storage.plain_settings()) == ("local", settings)
    assert config.is_tiered is is_tiered


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            LOCAL + UPSTREAM + "[storage]\nimplementation = 's3'\n",
            "class.name and [storage] implementation have",
        ),
        (
            LOCAL + "remote.log.storage.path = '/a'\n" + UPSTREAM + "[storage]\npath = '/b'\n",
            "remote.log.storage.path and [storage] path have different values",
        ),
        ("remote.log.storage.system.enabel = true\n" + UPSTREAM, "did you mean remote.log.storage.system.enable?"),
        ("remote.log.storage.path = '/a'\n" + UPSTREAM, "needs remote.log.storage.manager.class.name"),
        ("remote.log.metadata.topic.nam = 'x'\n" + UPSTREAM, "did you mean remote.log.metadata.topic.name?"),
        ("remote.log.metadata.path = 'x'\n" + UPSTREAM, "unknown key remote.log.metadata.path"),
    ],
)
def test_a_mistake_names_the_nearest_key_or_what_to_do(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_config(text)
    (line,) = str(raised.value).splitlines()
    assert said in line


def test_the_rest_of_the_metadata_keys_goes_to_the_metadata_manager() -> None:
    text = SQLITE + "remote.log.metadata.path = '/m'\nremote.log.metadata.topic.num.partitions = 7\n" + UPSTREAM
    remote_log = parse_config(text).remote_log
    assert not remote_log.is_topic_based
    assert remote_log.plain_metadata_settings() == {"path": "/m"}
    assert remote_log.metadata_topic_partitions == 7
    assert "/m" not in repr(remote_log)


def test_a_storage_manager_may_be_named_by_its_class(tmp_path: Path) -> None:
    settings = {"path": str(tmp_path), "cluster.id": "c"}
    storage = create_remote_storage_manager("tiers.storage.local:LocalRemoteStorageManager", settings)
    assert isinstance(storage, LocalRemoteStorageManager)


async def test_the_metadata_manager_uses_a_topic_or_the_named_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_example("sqlite-metadata", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    client, common = BrokerClient([("a", 1)], client_id="test"), TopicBasedSettings(tmp_path)
    for text, kind in (("", TopicBasedMetadataLog), (SQLITE + "remote.log.metadata.path = '/m'\n", SingleWriterLog)):
        known = parse_config(text + UPSTREAM).remote_log
        log = create_metadata_log(known.metadata_manager, known.plain_metadata_settings(), common, client, "c")
        assert isinstance(log, kind)
        assert known.is_topic_based == (kind is TopicBasedMetadataLog)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("floppy", {}, r"no remote log metadata manager is called 'floppy'; installed are .*topic_based"),
        ("no_module:Manager", {}, "'no_module:Manager' cannot be imported"),
        ("pathlib:Nothing", {}, "'pathlib:Nothing' cannot be imported"),
        ("pathlib:Path", {}, "is not a remote log metadata manager"),
        ("sqlite", {"paht": "/m"}, "did you mean path"),
        ("sqlite", {"topic.nme": "/m"}, r"did you mean remote\.log\.metadata\.topic\.name\?"),
        ("sqlite", {}, "'path' of the sqlite metadata manager is missing"),
    ],
)
def test_a_metadata_manager_that_cannot_be_created_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, settings: dict[str, str], said: str
) -> None:
    install_example("sqlite-metadata", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=said):
        create_record_log(name, settings)


async def test_commands_that_read_the_metadata_topic_refuse_another_manager() -> None:
    config = parse_config(SQLITE + LOCAL + UPSTREAM)
    with pytest.raises(RemoteTierError, match=r"'sqlite': it only works .* 'Without the metadata topic'"):
        async with tiered_cluster(config):
            pass
