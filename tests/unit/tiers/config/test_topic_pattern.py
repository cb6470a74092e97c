"""Patterns for topics in the settings file."""

from __future__ import annotations

import pytest

from tests.support.proxy.parsed_config import parse_config
from tiers.config.settings import check_pattern
from tiers.config.tier_config import ConfigError

BASE = '[upstream]\nbootstrap.servers = "b:1"\n[storage]\nimplementation = "local"\npath = "/x"\n'


@pytest.mark.parametrize(
    "pattern", ["orders", "orders-*", "logs-200?", "[a-z]*", "[!_]*.v[12]", "__internal", "[a,b]x", "[]a]x", "[!/]*"]
)
def test_names_and_shell_patterns_are_accepted(pattern: str) -> None:
    assert check_pattern(pattern) == pattern


REFUSED = ["", "[", "orders-[1", "orders-[!]", "orders,logs", "orders-{a,b}", "^orders.+$", "[z-a]*", "[,]x", ".."]


@pytest.mark.parametrize("pattern", [*REFUSED, "x" * 250])
def test_a_pattern_that_matches_no_topic_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="matches no topic: a topic name has letters"):
        check_pattern(pattern)


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("[[topics]]\npattern = '['", '[[topics]] number 1 (pattern "[") pattern = "["'),
        ("[[topics]]\nname = '['", '[[topics]] number 1 (name "[") name = "["'),
        ("[[storage.locations]]\nname = 'a'\ntopics = '['", '[[storage.locations]] number 1 (name "a") topics'),
    ],
)
def test_the_settings_file_is_refused_with_the_key(section: str, key: str) -> None:
    parse_config(BASE + section.replace("'['", "'*'"))
    with pytest.raises(ConfigError) as raised:
        parse_config(BASE + section)
    assert str(raised.value).startswith(f"configuration: {key}: '[' matches no topic: ")
