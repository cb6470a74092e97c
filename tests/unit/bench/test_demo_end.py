"""`make demo ARGS=--keep` prints the path of its configuration, and a command that works with it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from bench.demo import kept_running
from bench.demo_records import TOPIC


def test_the_configuration_and_a_command_are_printed() -> None:
    cluster = cast(Any, SimpleNamespace(bootstrap_servers="localhost:1"))
    proxy = cast(Any, SimpleNamespace(bootstrap_servers="localhost:2", config=Path("/tmp/x/tidegate.toml")))
    said = kept_running(cluster, proxy).splitlines()
    assert said[1] == "The configuration file of Tidegate: /tmp/x/tidegate.toml"
    assert said[2].endswith(f"tidegate tier bounds {TOPIC} --config /tmp/x/tidegate.toml")
