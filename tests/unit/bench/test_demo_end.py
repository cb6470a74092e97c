"""`make demo ARGS=--keep` prints the address of the page, its configuration, and a command that works with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bench.demo import kept_running
from bench.demo_records import TOPIC


def test_the_page_the_configuration_and_a_command_are_printed() -> None:
    cluster = cast(Any, SimpleNamespace(bootstrap_servers="localhost:1"))
    config = Path("/tmp/x/tidegate.toml")
    proxy = cast(Any, SimpleNamespace(bootstrap_servers="localhost:2", config=config, admin=("127.0.0.1", 9190)))
    said = kept_running(cluster, proxy).splitlines()
    assert said[1] == "Look at both tiers in a browser: http://127.0.0.1:9190/"
    assert said[2] == "The configuration file of Tidegate: /tmp/x/tidegate.toml"
    assert said[3].endswith(f"tidegate tier bounds {TOPIC} --config /tmp/x/tidegate.toml")
