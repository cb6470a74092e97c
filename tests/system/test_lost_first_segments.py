"""The metadata loses the first segments of a partition, and the broker has removed their records: clients wait.

Only the store shows that these segments exist. An operator's word ends the wait.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rigs.loss_rig import (
    ASK_AGAIN,
    Site,
    Watch,
    alarms,
    cut_log_at,
    leader_behind,
    lines_about,
    numbered,
    records_from,
    site_over_s3,
)
from tests.support.rigs.record_deletion import delete_records
from tests.support.rigs.strict_consumer import local_log_end, until_trimmed
from tests.support.rigs.topic_config_client import alter
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.versitygw import VersityGateway

pytestmark = pytest.mark.integration

RECORDS, MORE = 250, 150
KEPT_FOR_EVER = {"remote.log.retention.minutes": "-1"}


@pytest.fixture
def broker() -> Iterator[KafkaCluster]:
    """A cluster of one broker, for one test only."""
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as cluster:
        yield cluster


def found(site: Site, deleted: int) -> int:
    """Lets an owner begin with the topic, and deletes `deleted` records. Returns where the metadata's log ends then."""
    create_topic(site.cluster.bootstrap_servers, site.topic)
    with site.proxy() as proxy:
        assert alter(proxy.bootstrap_servers, {site.topic: KEPT_FOR_EVER}) == [0]
        until(lambda: site.bounds()["log_start_offset"] == 0)
        if deleted:
            produce(proxy.bootstrap_servers, site.topic, random_values(deleted))
            until(lambda: site.is_remote_up_to(deleted - 1))
            assert delete_records(proxy.bootstrap_servers, site.topic, deleted) == deleted
            until(lambda: not site.objects())
    return local_log_end(site.cluster, site.metadata_topic)


@pytest.mark.parametrize("deleted", [0, RECORDS], ids=["of-a-new-topic", "behind-deleted-records"])
def test_clients_wait_until_an_operator_accepts_the_first_segments(
    broker: KafkaCluster, s3: VersityGateway, topic_name: str, tmp_path: Path, deleted: int
) -> None:
    with site_over_s3(broker, s3, tmp_path, topic_name) as (site, _):
        metadata_end = found(site, deleted)
        end = deleted + RECORDS
        values = random_values(RECORDS)
        with site.alarmed_proxy() as proxy:
            produce(proxy.bootstrap_servers, topic_name, values)
            until(lambda: site.is_remote_up_to(end - 1))
        assert alter(broker.bootstrap_servers, {topic_name: {"retention.ms": "1"}}) == [0]
        until_trimmed(broker, topic_name, end)
        assert alter(broker.bootstrap_servers, {topic_name: {"retention.ms": None}}) == [0]
        broker.stop_broker(1)
        cut_log_at(broker.log_folder(site.metadata_topic, 0), metadata_end)
        broker.start_broker(1)
        shutil.rmtree(site.state)

        with site.alarmed_proxy() as proxy:
            until(lambda: alarms(proxy, topic_name, "metadata-lost") > 0)
            watch = Watch(site, proxy, [deleted, end - 1], deleted)
            leader = leader_behind(proxy)
            assert site.fetch_error(leader, deleted) in ASK_AGAIN
            assert site.earliest(leader) is None
            # The doubt is about the past: copying goes on.
            more = random_values(MORE)
            produce(proxy.bootstrap_servers, topic_name, more)
            values += more
            watch.until(lambda: site.is_remote_up_to(end + MORE - 1))
            assert records_from(proxy.bootstrap_servers, topic_name, end, MORE) == numbered(more, end)
            assert (site.fetch_error(leader, deleted) in ASK_AGAIN, site.earliest(leader)) == (True, None)
            until(lambda: bool(lines_about(proxy, f"{topic_name}-0", "tidegate tier accept")))

            code, out, err = site.tier("accept", f"{topic_name}:0", "--yes")
            assert (code, "The acceptance was written" in err) == (0, True), out + err
            watch.until(
                lambda: proxy.metric("tidegate_remote_log_alarm", topic=topic_name, reason="metadata-lost") == 0
            )
            assert site.until_earliest(leader) == deleted
            everything = records_from(proxy.bootstrap_servers, topic_name, deleted, len(values))
            assert everything == numbered(values, deleted)
            watch.check()
