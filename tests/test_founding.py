"""The names and the defaults of the settings of the founding texts hold."""

from __future__ import annotations

import pytest

from tests.support.proxy.parsed_config import parse_config
from tiers.config.settings import RemoteLogConfig

UPSTREAM = '[upstream]\nbootstrap.servers = "a:9092"\n'
STORAGE = '[storage]\nimplementation = "local"\npath = "/"\n'


def test_the_founding_defaults_hold() -> None:
    settings = RemoteLogConfig()
    assert (settings.metadata_topic, settings.metadata_topic_partitions) == ("__remote_log_metadata", 50)
    assert settings.custom_metadata_max_bytes == 128


@pytest.mark.parametrize("name", ["remote.log.storage.enable", "remote.log.storage.system.enable"])
def test_the_switch_turns_the_remote_tier_off(name: str) -> None:
    assert parse_config(UPSTREAM + STORAGE).is_tiered
    assert parse_config(f"{name} = true\n{UPSTREAM}{STORAGE}").is_tiered
    assert not parse_config(f"{name} = false\n{UPSTREAM}{STORAGE}").is_tiered


@pytest.mark.parametrize("name", ["remote.log.manager.task.interval.ms", "rlm_process_interval_ms"])
def test_the_names_of_an_interval_are_one_setting(name: str) -> None:
    assert parse_config(f'{name} = "7s"\n{UPSTREAM}').remote_log.task_interval_ms == 7000
