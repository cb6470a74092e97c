"""The metadata topic loses its end, and the saved state is gone: the proxy treats no record as removed, and an operator
brings them all back.

A power failure does this, if the disk has less of the metadata's log than of the topic's log.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from tests.support.rigs.loss_rig import (
    Site,
    Watch,
    alarms,
    cut_log,
    leader_behind,
    lines_about,
    not_ready,
    numbered,
    records_from,
)
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration

RECORDS, MORE = 1200, 300


def tiered(site: Site, values: list[bytes]) -> None:
    """Produces the values, and waits until they are copied and trimmed. Stops the proxy."""
    create_topic(site.cluster.bootstrap_servers, site.topic)
    with site.proxy() as proxy:
        produce(proxy.bootstrap_servers, site.topic, values)
        until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(site.cluster, site.topic, len(values) - 100)


def lose_the_end_and_the_state(site: Site) -> int:
    """Cuts the metadata's log, and deletes the saved state. Returns the broker's log start."""
    local_log_start = site.local_log_start()
    site.cluster.stop_broker(1)
    cut_log(site.cluster.log_folder(site.metadata_topic, 0))
    site.cluster.start_broker(1)
    shutil.rmtree(site.state)
    bounds = site.bounds()
    assert bounds["local_log_start"] == local_log_start
    assert bounds["remote_end"] + 1 < local_log_start - 200, "unknown segments lie between the tiers"
    return local_log_start


def spread(end: int) -> list[int]:
    """Returns offsets from the whole log."""
    return [*range(0, end, 100), end - 1]


def segments(site: Site) -> dict[str, int]:
    """Returns the first offsets of the copied segments, by segment id."""
    code, out, err = site.tier("segments", site.topic, "--json")
    assert code == 0, err
    return {
        each["segment"]: each["start_offset"] for each in json.loads(out) if each["state"] == "COPY_SEGMENT_FINISHED"
    }


def is_doubted(proxy: TidegateProcess, topic: str) -> bool:
    """Whether the alarm is active."""
    return proxy.metric("tidegate_remote_log_alarm", topic=topic, reason="metadata-lost") == 1


def accept(site: Site) -> None:
    """Accepts as the documentation says: first without `--yes`, which changes nothing."""
    for arguments, said in (([], "Nothing was written"), (["--yes"], "The acceptance was written")):
        code, out, err = site.tier("accept", f"{site.topic}:0", *arguments)
        assert (code, said in err, f"{site.topic}-0" in out) == (0, True, True), out + err


def test_an_acceptance_brings_back_what_only_the_store_knows(topic_name: str, tmp_path: Path) -> None:
    """Until then consumers wait. The broker has the newest segment, and the owner copies it again."""
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as broker:
        site, values = Site(broker, tmp_path, topic_name), random_values(RECORDS)
        tiered(site, values)
        copied = segments(site)
        local_log_start = lose_the_end_and_the_state(site)
        lost = copied.keys() - segments(site).keys()
        newest = {each for each in lost if copied[each] >= local_log_start}
        assert len(newest) == 1

        with site.alarmed_proxy() as proxy:
            watch = Watch(site, proxy, spread(RECORDS), covered=newest)
            watch.until(lambda: is_doubted(proxy, topic_name))
            until(lambda: bool(lines_about(proxy, f"{topic_name}-0", "tidegate tier accept")))
            produce(proxy.bootstrap_servers, topic_name, more := random_values(MORE))
            values += more
            watch.until(lambda: site.is_remote_up_to(len(values) - 1))
            assert site.fetch_error(leader_behind(proxy), local_log_start - 1) == ErrorCode.REPLICA_NOT_AVAILABLE
            assert (site.local_log_start(), site.bounds()["gaps"]) == (local_log_start, [])
            accept(site)

        with site.proxy() as proxy:
            watch = Watch(site, proxy, spread(len(values)), covered=newest)
            watch.until(lambda: lost - newest <= segments(site).keys())
            assert records_from(proxy.bootstrap_servers, topic_name, 0, len(values)) == numbered(values)
            until_trimmed(broker, topic_name, len(values) - 100)
            watch.check()
            assert (site.bounds()["gaps"], alarms(proxy, topic_name), not_ready(proxy)) == ([], 0, "")
