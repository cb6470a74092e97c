"""A broker lost its disk, and the remote tier has the only copy of its old records: none of them may be deleted.

The new records of the broker have the same offsets. An operator must decide which of the two histories is valid."""

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

COPIED, NEW = 600, 900


def refused_to_delete(proxy: TidegateProcess, topic: str, offset: int) -> bool:
    """Whether the client gets an error that it does not retry."""
    with pytest.raises(KafkaException) as refused:
        delete_records(proxy.bootstrap_servers, topic, offset)
    return bool(refused.value.args[0].code() == KafkaError.POLICY_VIOLATION)


def accept(site: Site, *more: str) -> tuple[str, str]:
    code, out, err = site.tier("accept", f"{site.topic}:0", *more)
    assert code == 0, err
    return out, err


@pytest.mark.parametrize("log_start", [0, COPIED + 100], ids=["from the first offset", "from behind all copied ones"])
def test_an_operator_says_that_the_new_records_count(topic_name: str, tmp_path: Path, log_start: int) -> None:
    """An administrator's deletion at the broker hides the leader's other history from its answers."""
    topic, witness = topic_name, f"{topic_name}-beside"
    with KafkaCluster(settings=SHRINKS_SOON, java_options=SHORT_LIVED) as broker:
        site = Site(broker, tmp_path, topic, witness=witness)
        for each in (topic, witness):
            create_topic(broker.bootstrap_servers, each)
        with site.proxy() as proxy:
            produce(proxy.bootstrap_servers, topic, random_values(COPIED))
            until(lambda: site.is_remote_up_to(COPIED - 1))
            until_trimmed(broker, topic, COPIED // 2)
            old = site.objects()

            broker.stop_broker(1)
            shutil.rmtree(broker.log_folder(topic, 0))
            broker.start_broker(1)
            values = random_values(NEW)
            produce(proxy.bootstrap_servers, topic, values)
            assert refused_to_delete(proxy, topic, COPIED + 50)
            assert site.local_log_start() == 0
            assert lines_about(proxy, "tidegate tier accept", "diverged")
            until(lambda: alarms(proxy, topic, "diverged") > 0)
            if log_start:
                assert delete_records(broker.bootstrap_servers, topic, log_start) == log_start
            # The owner copies the other topic in rounds that come after the deletion.
            produce(broker.bootstrap_servers, witness, random_values(COPIED))
            until(lambda: site.is_remote_up_to(COPIED - 1, witness))
            assert refused_to_delete(proxy, topic, log_start + 50)
            assert site.local_log_start() == log_start
            assert old <= site.objects()

            out, err = accept(site, "--json")
            replaced = json.loads(out)["replaced"]
            assert (replaced["first_offset"], replaced["segments"]) == (0, len(old) // 2)
            assert "Nothing was written" in err
            assert "stay in the store" in accept(site)[0]
            assert old <= site.objects()
            accept(site, "--yes")
            until(lambda: site.is_remote_up_to(NEW - 1))
            until_trimmed(broker, topic, NEW - 200)

            assert old < site.objects()
            assert site.until_earliest(leader_behind(proxy)) == log_start
            assert (
                records_from(proxy.bootstrap_servers, topic, log_start, NEW - log_start) == numbered(values)[log_start:]
            )
            _, out, _ = site.tier("segments", "--json", topic)
            assert sum(each["valid_end_offset"] < each["end_offset"] for each in json.loads(out)) == len(old) // 2
            # A user's deletion in the new history is valid, and removes nothing of the old history.
            deleted_to = log_start + 150
            assert delete_records(proxy.bootstrap_servers, topic, deleted_to) == deleted_to
            assert site.until_earliest(leader_behind(proxy)) == deleted_to
            until(lambda: site.bounds()["remote_start"] > log_start)
            assert old < site.objects()
