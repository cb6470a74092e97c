"""All metadata is lost, and the proxies have no state: they conclude nothing from that."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from protocol.errors import ErrorCode
from tests.support.rigs.loss_rig import Site, Watch, alarms, leader_behind, numbered, records_from
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values

pytestmark = pytest.mark.integration

RECORDS = 600


@pytest.mark.parametrize("workers", [0, 2])
def test_consumers_wait_where_metadata_was_lost(topic_name: str, tmp_path: Path, workers: int) -> None:
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as broker:
        site, values = Site(broker, tmp_path, topic_name, workers=workers), random_values(RECORDS)
        create_topic(broker.bootstrap_servers, topic_name)
        with site.proxy() as proxy:
            produce(proxy.bootstrap_servers, topic_name, values)
            until(lambda: site.is_remote_up_to(RECORDS - 1))
            until_trimmed(broker, topic_name, RECORDS // 2)
        broker.stop_broker(1)
        shutil.rmtree(broker.log_folder(site.metadata_topic, 0))
        shutil.rmtree(site.state)
        broker.start_broker(1)

        log_start = site.local_log_start()
        with site.alarmed_proxy() as proxy:
            watch = Watch(site, proxy, [0, log_start - 1, log_start, RECORDS - 1])
            watch.until(lambda: alarms(proxy, topic_name, "metadata-lost") > 0)
            leader = leader_behind(proxy)
            assert site.earliest(leader) is None
            assert site.fetch_error(leader, 0) == ErrorCode.REPLICA_NOT_AVAILABLE
            local = records_from(proxy.bootstrap_servers, topic_name, log_start, RECORDS - log_start)
            assert local == numbered(values)[log_start:]
            watch.check()
