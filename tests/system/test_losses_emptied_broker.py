"""A broker lost its disk, and the remote tier has the only copy of its old records: none of them may be deleted.

The new records of the broker have the same offsets. While they are fewer than the copied ones, an operator must decide
which of the two histories is valid."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.cimpl import KafkaError

from tests.support.rigs.loss_rig import Site, alarms, leader_behind, lines_about, numbered, records_from
from tests.support.rigs.record_deletion import delete_records
from tests.support.rigs.strict_consumer import until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import SHORT_LIVED, SHRINKS_SOON, KafkaCluster
from tests.support.servers.producing import create_topic, produce, random_values
from tests.support.servers.tidegate import TidegateProcess

pytestmark = pytest.mark.integration

COPIED, SHORTER, NEW = 600, 300, 900


def refused_to_delete(proxy: TidegateProcess, topic: str, offset: int) -> bool:
    """Whether the client gets an error that it does not retry."""
    with pytest.raises(KafkaException) as refused:
        delete_records(proxy.bootstrap_servers, topic, offset)
    return bool(refused.value.args[0].code() == KafkaError.POLICY_VIOLATION)


def cut(site: Site, *more: str) -> tuple[str, str]:
    code, out, err = site.tier("cut", f"{site.topic}:0", "0", *more)
    assert code == 0, err
    return out, err


def test_an_operator_says_that_the_new_records_count(topic_name: str, tmp_path: Path) -> None:
    """The new log is shorter than the tier, so the partition stops."""
    topic = topic_name
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as broker:
        site = Site(broker, tmp_path, topic)
        create_topic(broker.bootstrap_servers, topic)
        with site.proxy() as proxy:
            old = emptied(site, broker, proxy)
            values = random_values(SHORTER)
            produce(proxy.bootstrap_servers, topic, values)
            assert refused_to_delete(proxy, topic, 50)
            assert site.local_log_start() == 0
            assert lines_about(proxy, "tidegate tier cut", "diverged")
            until(lambda: alarms(proxy, topic, "diverged") > 0)
            assert old <= site.objects()

            out, err = cut(site, "--json")
            found = json.loads(out)
            assert (found["cuts"][0]["offset"], found["void"]["segments"]) == (0, len(old) // 2)
            assert "Nothing was written" in err
            assert "stay in the store" in cut(site)[0]
            assert old <= site.objects()
            cut(site, "--yes")
            values += random_values(NEW)
            produce(proxy.bootstrap_servers, topic, values[SHORTER:])
            has_the_new_history(site, broker, proxy, old, values)


def emptied(site: Site, broker: KafkaCluster, proxy: TidegateProcess) -> set[Path]:
    """Copies and trims records, and empties the broker. Returns the objects of the old history."""
    produce(proxy.bootstrap_servers, site.topic, random_values(COPIED))
    until(lambda: site.is_remote_up_to(COPIED - 1))
    until_trimmed(broker, site.topic, COPIED // 2)
    old = site.objects()
    broker.stop_broker(1)
    shutil.rmtree(broker.log_folder(site.topic, 0))
    broker.start_broker(1)
    return old


def has_the_new_history(
    site: Site, broker: KafkaCluster, proxy: TidegateProcess, old: set[Path], values: list[bytes]
) -> None:
    topic, end = site.topic, len(values)
    until(lambda: site.is_remote_up_to(end - 1))
    until_trimmed(broker, topic, end - 200)
    assert old < site.objects()
    assert site.until_earliest(leader_behind(proxy)) == 0
    assert records_from(proxy.bootstrap_servers, topic, 0, end) == numbered(values)
    _, out, _ = site.tier("segments", "--json", topic)
    assert sum(each["valid_end_offset"] < each["end_offset"] for each in json.loads(out)) == len(old) // 2
    # A user's deletion in the new history is valid, and removes nothing of the old history.
    assert delete_records(proxy.bootstrap_servers, topic, 150) == 150
    assert site.until_earliest(leader_behind(proxy)) == 150
    until(lambda: site.bounds()["remote_start"] > 0)
    assert old < site.objects()
