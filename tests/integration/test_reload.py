"""A running proxy reads its file again: other topics, other retentions and another copy quota take effect."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]  # they export it without saying so
    AdminClient,
    ConfigResource,
)

from tests.support.rigs.strict_consumer import consumer_at, local_log_start, read, until_trimmed
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

pytestmark = [pytest.mark.integration, pytest.mark.full]
RECORDS = 2_000
QUOTA = "remote.log.manager.copy.max.bytes.per.second"
KEEPS_LITTLE = 'local.retention.bytes = 1\nsegment.bytes = 400000\nsegment.ms = "1s"\n'
KEEPS_ALL = 'segment.bytes = 400000\nsegment.ms = "1s"\n'


class Operator:
    """Changes the file of a running proxy, and looks at its page."""

    def __init__(self, proxy: TidegateProcess) -> None:
        self._proxy = proxy
        self._base = proxy.config.read_text()

    def lift_quota(self) -> None:
        self._base = re.sub(rf"^{re.escape(QUOTA)} = .*$", "", self._base, flags=re.MULTILINE)

    def tier(self, **topics: str) -> None:
        """Lets the proxy tier these topics, each with its keys."""
        rules = (f'[[topics]]\nname = "{topic}"\n{keys}' for topic, keys in topics.items())
        self._proxy.config.write_text(self._base + "".join(rules))
        os.kill(self._proxy.pid, signal.SIGHUP)

    def json(self, path: str) -> Any:
        url = f"http://{self._proxy.admin[0]}:{self._proxy.admin[1]}/api/v1{path}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return json.loads(answer.read())

    def states(self) -> dict[str, str]:
        return {each["topic"]: each["state"] for each in self.json("/topics")["topics"]}

    def setting(self, topic: str, key: str) -> tuple[str, str]:
        settings = self.json(f"/topics/{topic}")["topic"]["settings"]
        return next((each["value"], each["source"]) for each in settings if each["key"] == key)

    def copied(self, topic: str) -> int:
        """The number of records that are remote or were trimmed."""
        end = self.json(f"/topics/{topic}/0")["line"]["remote_end"]
        return 0 if end is None else int(end) + 1

    def newest_segment(self, topic: str) -> int:
        return int(self.json(f"/topics/{topic}/0")["segments"][-1]["start_offset"])

    def alarms(self) -> set[str]:
        return {each["name"] for each in self.json("/overview")["alarms"]}

    def is_throttled(self) -> bool:
        text = self._proxy.metrics()
        found = re.findall(r"^tidegate_remote_copy_throttle_time_seconds_count\S* (\S+)$", text, re.MULTILINE)
        return sum(map(float, found)) > 0


def shown(proxy: TidegateProcess, topic: str) -> str | None:
    """What a client sees of `remote.storage.enable`."""
    admin = AdminClient({"bootstrap.servers": proxy.bootstrap_servers})
    (answer,) = admin.describe_configs([ConfigResource(ConfigResource.Type.TOPIC, topic)]).values()
    value = answer.result(TIMEOUT_S)["remote.storage.enable"].value
    return None if value is None else str(value)


def offsets_from_the_start(proxy: TidegateProcess, topic: str, count: int) -> list[int]:
    with consumer_at(proxy.bootstrap_servers, topic, 0) as consumer:
        return [offset for offset, _ in read(consumer, count)]


def test_a_running_proxy_follows_its_file(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    """`steady` is tiered all the time. So a copy of its records shows that the proxy has worked meanwhile."""
    topic, steady = topic_name, f"steady-{topic_name}"[:200]
    for each in (topic, steady):
        create_topic(kafka.bootstrap_servers, each)
    settings: dict[str, str | int] = {
        "workers": 2,
        "remote.log.metadata.topic.name": f"__metadata-{topic_name}"[:200],
        "remote.log.visible.after.ms": 1000,
        QUOTA: 1,
    }
    with tidegate_over(kafka, tmp_path, settings=settings) as proxy:
        operator = Operator(proxy)
        written = 0

        def write() -> int:
            nonlocal written
            for each in (topic, steady):
                produce(proxy.bootstrap_servers, each, random_values(RECORDS))
            written += RECORDS
            return written

        write()
        assert operator.states() == {}
        operator.tier(**{steady: KEEPS_LITTLE})
        until(operator.is_throttled)
        until(lambda: operator.states() == {steady: "tiered"})
        assert operator.copied(steady) < written
        operator.lift_quota()
        operator.tier(**{steady: KEEPS_LITTLE})
        until(lambda: operator.copied(steady) == written)
        assert (operator.states(), shown(proxy, topic)) == ({steady: "tiered"}, "false")

        operator.tier(**{steady: KEEPS_LITTLE, topic: KEEPS_LITTLE})
        until_trimmed(kafka, topic, written // 2)
        assert shown(proxy, topic) == "true"
        until(lambda: operator.states().get(topic) == "tiered")  # a look of the page is some seconds old
        assert offsets_from_the_start(proxy, topic, written) == list(range(written))
        until(lambda: operator.copied(topic) == written)
        until(lambda: local_log_start(kafka, topic) == operator.newest_segment(topic))

        operator.tier(**{steady: KEEPS_LITTLE, topic: KEEPS_ALL})
        until(lambda: operator.setting(topic, "local.retention.bytes") == ("-2", "default"))
        start = local_log_start(kafka, topic)
        copied = write()
        until(lambda: operator.copied(topic) == copied)
        until_trimmed(kafka, steady, copied - RECORDS // 2)
        assert local_log_start(kafka, topic) == start

        operator.tier(**{steady: KEEPS_LITTLE})
        until(lambda: operator.states()[topic] == "paused")
        write()
        until(lambda: operator.copied(steady) == written)
        assert (operator.copied(topic), local_log_start(kafka, topic)) == (copied, start)
        assert shown(proxy, topic) == "false"
        assert offsets_from_the_start(proxy, topic, written) == list(range(written))

        total = KEEPS_LITTLE + "remote.log.retention.minutes = 20000\n"
        operator.tier(**{steady: KEEPS_LITTLE, topic: total})
        until(lambda: operator.copied(topic) == written)
        until_trimmed(kafka, topic, written - RECORDS // 2)
        until(lambda: operator.setting(topic, "remote.log.retention.minutes") == ("20000", "topic"))
        assert operator.alarms() == set()
        operator.tier(**{steady: KEEPS_LITTLE, topic: total.replace("20000", "30000")})
        until(lambda: operator.alarms() == {"retention-differs"})
        operator.tier(**{steady: KEEPS_LITTLE, topic: total})
        until(lambda: operator.alarms() == set())
        assert offsets_from_the_start(proxy, topic, written) == list(range(written))
        assert "need a restart" not in proxy.output.read_text()
