"""Wrong settings are reported before any request to a cluster or a store."""

from __future__ import annotations

import pytest

from pipeline.config import parse_pipeline_config
from tiers.access.open_tier import open_storage
from tiers.commands.console import MISUSED, explained
from tiers.config.tier_config import ConfigError


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ('implementation = "s4"', r"\[storage\] s4: .*s3"),
        ('implementation = "local"\npth = "/tier"', r"\[storage\] local: .*pth"),
    ],
)
async def test_a_store_that_no_settings_can_be_of_is_misuse(storage: str, said: str) -> None:
    config = parse_pipeline_config(f'[upstream]\nbootstrap.servers = "localhost:1"\n[storage]\n{storage}\n')
    with pytest.raises(ConfigError, match=said) as refused:
        async with open_storage(config, "cluster"):
            pass
    assert explained(refused.value)[1] == MISUSED
