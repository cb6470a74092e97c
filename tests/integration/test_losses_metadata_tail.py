"""The metadata topic loses its end with what broker and store go on from: nothing is taken for removed, all comes back.

As when the power fails, and the disk has less of the metadata's log than of the topic's."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.loss_rig import (
    Site,
    Watch,
    alarms,
    cut_log,
    grow_log,
    leader_behind,
    lines_about,
    metric,
    not_ready,
    numbered,
    records_from,
)
from tests.integration.strict_consumer import until_trimmed
from tests.integration.waiting import until
from tests.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.servers.producing import create_topic, produce, random_values
from tiers.metadata.serde import SEGMENT_METADATA_API_KEY, SEGMENT_METADATA_UPDATE_API_KEY

pytestmark = pytest.mark.integration

RECORDS, MORE = 1200, 300
COPY_STARTED, COPY_FINISHED = SEGMENT_METADATA_API_KEY, SEGMENT_METADATA_UPDATE_API_KEY
REBUILT = "__metadata-rebuilt"


@pytest.fixture
def broker() -> Iterator[KafkaCluster]:
    """Alone, and of the test alone."""
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as cluster:
        yield cluster


def tiered(site: Site, values: list[bytes]) -> None:
    """Copied and trimmed; the proxy is stopped again."""
    create_topic(site.cluster.bootstrap_servers, site.topic)
    with site.proxy() as proxy:
        produce(proxy.bootstrap_servers, site.topic, values)
        until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(site.cluster, site.topic, len(values) - 100)


def lose_the_tail(site: Site, last: int) -> tuple[int, int]:
    """Of the metadata, and nothing else, while the broker is down. Returns the log's end before and after."""
    site.cluster.stop_broker(1)
    ends = cut_log(site.cluster.log_folder(site.metadata_topic, 0), last)
    site.cluster.start_broker(1)
    return ends


def spread(end: int) -> list[int]:
    """Offsets all over the log."""
    return [*range(0, end, 100), end - 1]


def rebuild(site: Site) -> None:
    """As an operator is told to."""
    code, out, err = site.tier("rebuild", "--into", REBUILT, "--yes")
    assert (code, err) == (0, ""), out
    site.metadata_topic = REBUILT
    shutil.rmtree(site.state / "metadata", ignore_errors=True)


def check_all_is_well(site: Site, values: list[bytes]) -> None:
    """All can be read, and copying and trimming go on."""
    with site.proxy() as proxy:
        watch = Watch(site, proxy, spread(len(values)))
        assert records_from(proxy.bootstrap_servers, site.topic, 0, len(values)) == numbered(values)
        more = random_values(MORE)
        produce(proxy.bootstrap_servers, site.topic, more)
        values += more
        watch.until(lambda: site.is_remote_up_to(len(values) - 1))
        until_trimmed(site.cluster, site.topic, len(values) - 100)
        watch.check()
        assert records_from(proxy.bootstrap_servers, site.topic, 0, len(values)) == numbered(values)
        assert (alarms(proxy, site.topic), not_ready(proxy)) == (0, "")
        assert metric(proxy, "tidegate_remote_log_metadata_alarm") == 0


@pytest.mark.parametrize("last", [COPY_STARTED, COPY_FINISHED], ids=["a-copy-began", "a-copy-ended"])
def test_a_proxy_that_knows_no_more_than_the_topic_deletes_nothing(
    broker: KafkaCluster, topic_name: str, tmp_path: Path, last: int
) -> None:
    """What was copied looks like what was removed, or like a copy that did not end and is to be cleaned up."""
    site, values = Site(broker, tmp_path, topic_name), random_values(RECORDS)
    tiered(site, values)
    objects, local_log_start = site.objects(), site.local_log_start()
    lose_the_tail(site, last)
    shutil.rmtree(site.state)
    bounds = site.bounds()
    assert bounds["local_log_start"] == local_log_start
    assert bounds["remote_end"] + 1 < local_log_start - 200, "segments that nobody knows of lie between the tiers"

    with site.alarmed_proxy() as proxy:
        watch = Watch(site, proxy, spread(RECORDS))
        watch.until(lambda: alarms(proxy, topic_name, "diverged", "metadata-lost") > 0)
        until(lambda: bool(lines_about(proxy, f"{topic_name}-0", "tidegate tier rebuild")))
        produce(proxy.bootstrap_servers, topic_name, more := random_values(MORE))
        values += more
        # What is known is read on, and so is what the broker has.
        known = bounds["remote_end"] + 1
        assert records_from(proxy.bootstrap_servers, topic_name, 0, known) == numbered(values)[:known]
        found = records_from(proxy.bootstrap_servers, topic_name, local_log_start, len(values) - local_log_start)
        assert found == numbered(values)[local_log_start:]
        watch.check()
        assert site.earliest(leader_behind(proxy)) in (0, None)
    assert (site.objects(), site.local_log_start()) == (objects, local_log_start)

    rebuild(site)
    check_all_is_well(site, values)


def test_a_proxy_that_read_the_lost_end_notices_though_the_log_has_grown_past_it(
    broker: KafkaCluster, topic_name: str, tmp_path: Path
) -> None:
    """Offsets alone look whole; the leader epochs do not."""
    site, values = Site(broker, tmp_path, topic_name), random_values(RECORDS)
    tiered(site, values)
    objects, local_log_start = site.objects(), site.local_log_start()
    end, cut_to = lose_the_tail(site, COPY_FINISHED)
    grow_log(broker.bootstrap_servers, site.metadata_topic, end - cut_to + 10)
    produce(broker.bootstrap_servers, topic_name, more := random_values(MORE))
    values += more

    with site.alarmed_proxy() as proxy:
        watch = Watch(site, proxy, spread(RECORDS))

        def is_noticed() -> bool:
            copied_bytes = metric(proxy, "tidegate_remote_copy_bytes_total", topic=topic_name)
            assert copied_bytes == 0, "copying goes on beside a metadata topic that lost records"
            return "lost" in not_ready(proxy) or metric(proxy, "tidegate_remote_log_metadata_alarm") == 1

        watch.until(is_noticed)
        until(lambda: bool(lines_about(proxy, "tidegate tier rebuild")))
        watch.until(is_noticed)
    assert (site.objects(), site.local_log_start()) == (objects, local_log_start)

    rebuild(site)
    check_all_is_well(site, values)
