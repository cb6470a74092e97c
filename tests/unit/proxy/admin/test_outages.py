"""The root causes among the alarms, and what follows from them."""

from __future__ import annotations

from dataclasses import replace

from proxy.admin.facts import BROKERS, BrokerFacts, ClusterFacts, RaisedAlarm, TierBytes, WaitingRead
from proxy.admin.outages import sort_out, store_name
from proxy.admin.words import outage_lines
from tests.support.proxy.parsed_config import parse_config
from tiers.errors import Peer

DAY_MS = 86_400_000
AT_MS = 1_000 * DAY_MS + 28_512_000
"""07:55:12 of a day."""
STORE = RaisedAlarm("store-failing", "", "connection refused", "remote-log", AT_MS)
SILENT = RaisedAlarm("no-broker-answers", BROKERS, "connection refused", "worker-1", AT_MS)
STALLED = RaisedAlarm("copy-stalled", "orders", "orders-0: connection refused", waits_for=Peer.STORE)
SURVEY = RaisedAlarm("stage-failing", "orders", "orders-0 survey: no leader", waits_for=Peer.BROKERS)
DIFFERS = RaisedAlarm("retention-differs", "orders", "7 d, not 5 d")
WAITING = (
    WaitingRead("billing", "orders", 0, 0, AT_MS + 2_000, "the store is down"),
    WaitingRead("billing", "orders", 1, 0, AT_MS + 3_000, "the store is down"),
    WaitingRead("reports", "orders", 0, 0, AT_MS + 4_000, "the store is down"),
)
BROKER = BrokerFacts(1, "10.0.0.1", 9092, None, 3, is_controller=True)
CLUSTER = ClusterFacts(
    "id", (BROKER,), None, (), 1, 4, TierBytes(), None, 5, (), waiting_for_store=3, waiting_for_brokers=1
)


def lines(*alarms: RaisedAlarm, cluster: ClusterFacts | None = CLUSTER, now_ms: int = AT_MS + 60_000) -> list[str]:
    found = sort_out(alarms, cluster, WAITING, lambda location: f"store s3 at http://s3{location}")
    return [line for outage in found.outages for line in outage_lines(outage, now_ms)] + [
        f"- {each.name}" for each in found.others
    ]


def test_a_store_that_does_not_answer_is_the_cause_of_what_waits_for_it() -> None:
    assert lines(STALLED, DIFFERS, STORE) == [
        "store s3 at http://s3: connection refused since 07:55:12 UTC",
        "  2 clients wait since 07:55:14 UTC",
        "  the copying of 3 partitions waits",
        "  copy-stalled: orders",
        "- retention-differs",
    ]


def test_an_alarm_without_its_cause_stands_alone() -> None:
    assert lines(STALLED, SURVEY) == ["- copy-stalled", "- stage-failing"]
    assert lines(STALLED, SILENT)[-1] == "- copy-stalled"


def test_a_store_that_several_processes_miss_is_one_cause() -> None:
    later = replace(STORE, process="remote-reader", since_ms=AT_MS + 5_000, detail="no answer in 4 s")
    assert lines(later, STORE)[0] == "store s3 at http://s3: connection refused since 07:55:12 UTC"
    cold = replace(STORE, about="cold")
    assert [each for each in lines(STORE, cold) if each.startswith("store")] == [
        "store s3 at http://s3: connection refused since 07:55:12 UTC",
        "store s3 at http://s3cold: connection refused since 07:55:12 UTC",
    ]


def test_an_outage_of_yesterday_has_its_day() -> None:
    assert lines(STORE, now_ms=AT_MS + DAY_MS)[0].endswith("since 1972-09-27 07:55:12 UTC")


def test_brokers_that_are_all_gone_are_one_cause() -> None:
    assert lines(SURVEY, SILENT) == [
        "broker 1 at 10.0.0.1:9092: connection refused since 07:55:12 UTC",
        "  clients reach no broker",
        "  the copying of 1 partition waits",
        "  stage-failing: orders",
    ]
    in_time = replace(SILENT, detail="no connection to 10.0.0.1:9092 in time")
    assert lines(in_time)[0] == "broker 1 at 10.0.0.1:9092: no connection in time since 07:55:12 UTC"
    three = replace(CLUSTER, brokers=tuple(replace(BROKER, node_id=each) for each in (1, 2, 3)))
    assert lines(SILENT, cluster=three)[0].startswith("all 3 brokers: connection refused")
    assert lines(SILENT, cluster=None)[0].startswith("all brokers: connection refused")


def test_a_broker_that_left_is_a_cause_if_something_waits_for_it() -> None:
    gone = replace(CLUSTER, brokers=(BROKER, replace(BROKER, node_id=2, gone_since_ms=AT_MS)))
    assert lines(SURVEY, cluster=gone)[0] == "broker 2 at 10.0.0.1:9092: not in the cluster since 07:55:12 UTC"
    assert lines(DIFFERS, cluster=gone) == ["- retention-differs"]


def test_a_store_has_the_name_of_its_settings_without_secrets() -> None:
    config = parse_config(
        '[upstream]\nbootstrap.servers = "a:1"\n[storage]\nimplementation = "s3"\nbucket = "tier"\n'
        'endpoint.url = "http://user:word@s3.example.org?key=1"\n'
        '[[storage.locations]]\nname = "cold"\nimplementation = "local"\npath = "/cold"\n'
        '[[storage.locations]]\nname = "tape"\nimplementation = "tape:Store"\npath = "secret"\n'
        '[[topics]]\nname = "orders"\n'
    )
    assert store_name(config, "") == "store s3 at http://s3.example.org"
    assert store_name(config, "cold") == "store local at /cold (location cold)"
    assert store_name(config, "tape") == "store tape:Store (location tape)"
