"""The settings of librdkafka's clients in the benchmark, and their command line."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LOG_ERRORS = 3
"""A syslog level: librdkafka reports retries that succeed as warnings."""
TIMEOUT_S = 60.0

Setting = str | int | float | bool


@dataclass(frozen=True)
class Target:
    """A topic of a cluster, and the settings with which every client reaches it, such as those of TLS and SASL."""

    bootstrap: str
    topic: str
    settings: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        pairs = [word for key, value in self.settings.items() for word in ("-X", f"{key}={value}")]
        return ["--bootstrap", self.bootstrap, "--topic", self.topic, *pairs]

    def consumer_settings(self) -> dict[str, Setting]:
        """The settings of a consumer that reads as the Java consumer does by default.

        By default, librdkafka waits for a second when its queue is full. A backfill would then measure that wait."""
        return {
            "bootstrap.servers": self.bootstrap,
            "group.id": "bench",
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 0,
            "log_level": LOG_ERRORS,
            **self.settings,
        }

    def producer_settings(self) -> dict[str, Setting]:
        return {
            "bootstrap.servers": self.bootstrap,
            "linger.ms": 0,
            "acks": "all",
            "log_level": LOG_ERRORS,
            **self.settings,
        }


def add_target(arguments: argparse.ArgumentParser) -> None:
    arguments.add_argument("--bootstrap", required=True)
    arguments.add_argument("--topic", required=True)
    arguments.add_argument("-X", dest="settings", action="append", default=[], metavar="KEY=VALUE")


def target_of(given: argparse.Namespace) -> Target:
    return Target(given.bootstrap, given.topic, pairs(given.settings))


def pairs(settings: Sequence[str]) -> dict[str, str]:
    """Returns the settings of `KEY=VALUE` words."""
    return dict(one.split("=", 1) for one in settings)
