"""`parse_config`: the settings of a proxy from TOML text."""

from __future__ import annotations

from proxy.config import TidegateConfig
from tiers.config.tier_config import parse_config_text


def parse_config(text: str, name: str = "configuration") -> TidegateConfig:
    """Raises `ConfigError`."""
    return parse_config_text(text, TidegateConfig, name)
