"""Finds the root causes among the alarms: the stores and the brokers that do not answer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from proxy.admin.facts import ClusterFacts, Outage, RaisedAlarm, WaitingRead
from proxy.admin.settings_facts import without_secrets
from proxy.config import TidegateConfig
from tiers.errors import Peer

_ROOTS: Final = {"store-failing": Peer.STORE, "no-broker-answers": Peer.BROKERS}
_ADDRESSES: Final[Mapping[str, tuple[tuple[str, str], ...]]] = {
    "s3": (("endpoint.url", ""), ("bucket", "s3://")),
    "arrow": (("endpoint.url", ""), ("uri", "")),
    "hdfs": (("url", ""),),
    "local": (("path", ""),),
}
"""By storage manager: the settings that say where the store is, the best first, each with what stands before it."""


class Sorted(NamedTuple):
    """The root causes, each with the alarms that follow from it, and the other alarms."""

    outages: tuple[Outage, ...]
    others: tuple[RaisedAlarm, ...]


def sort_out(
    alarms: Sequence[RaisedAlarm],
    cluster: ClusterFacts | None,
    waiting: Sequence[WaitingRead],
    store_name: Callable[[str], str],
) -> Sorted:
    """`store_name` names the store of a location."""
    roots: dict[tuple[Peer, str], RaisedAlarm] = {}
    others = []
    for alarm in alarms:
        peer = _ROOTS.get(alarm.name)
        if peer is None:
            others.append(alarm)
        else:  # several processes may have it: the earliest time counts
            key = peer, alarm.about
            roots[key] = min(alarm, roots.get(key, alarm), key=lambda each: each.since_ms or 0)
    found = [
        Outage(peer, alarm.name, store_name(alarm.about), alarm.detail, alarm.since_ms)
        if peer is Peer.STORE
        else _of_brokers(alarm, cluster)
        for (peer, _), alarm in sorted(roots.items())
    ]
    waits_for_brokers = any(alarm.waits_for is Peer.BROKERS for alarm in others)
    if cluster is not None and waits_for_brokers and not any(each.peer is Peer.BROKERS for each in found):
        found += [
            Outage(
                Peer.BROKERS, "no-broker-answers", f"broker {each.node_id} at {each.host}:{each.port}",
                "not in the cluster", each.gone_since_ms,
            )
            for each in cluster.brokers
            if each.gone_since_ms is not None
        ]  # fmt: skip
    return _with_effects(found, others, cluster, waiting)


def _with_effects(
    found: Sequence[Outage],
    others: Sequence[RaisedAlarm],
    cluster: ClusterFacts | None,
    waiting: Sequence[WaitingRead],
) -> Sorted:
    """The first outage of a kind has the effects of all: no alarm tells which of two stores it waits for."""
    outages: list[Outage] = []
    for outage in found:
        if any(each.peer is outage.peer for each in outages):
            outages.append(outage)
            continue
        is_of_store = outage.peer is Peer.STORE
        reads = waiting if is_of_store else ()
        partitions = 0
        if cluster is not None:
            partitions = cluster.waiting_for_store if is_of_store else cluster.waiting_for_brokers
        outages.append(
            replace(
                outage,
                clients=len({each.client_id for each in reads}),
                clients_since_ms=min((each.since_ms for each in reads), default=None),
                partitions=partitions,
                consequences=tuple(alarm for alarm in others if alarm.waits_for is outage.peer),
            )
        )
    folded = {each.peer for each in outages}
    return Sorted(tuple(outages), tuple(alarm for alarm in others if alarm.waits_for not in folded))


def _of_brokers(alarm: RaisedAlarm, cluster: ClusterFacts | None) -> Outage:
    """Returns the outage of all brokers. Its reason does not repeat the address of the only one."""
    brokers = _brokers(cluster)
    reason = alarm.detail.replace(f" to {brokers.rpartition(' at ')[2]}", "")
    return Outage(Peer.BROKERS, alarm.name, brokers, reason, alarm.since_ms)


def _brokers(cluster: ClusterFacts | None) -> str:
    if cluster is None or not cluster.brokers:
        return "all brokers"
    if len(cluster.brokers) > 1:
        return f"all {len(cluster.brokers)} brokers"
    (broker,) = cluster.brokers
    return f"broker {broker.node_id} at {broker.host}:{broker.port}"


def store_name(config: TidegateConfig, location: str) -> str:
    """Returns the kind of a store and where it is. The settings of a third party's storage manager may be secret."""
    storage = config.storage
    assert storage is not None
    implementation, settings = storage.implementation, storage.plain_settings()
    for each in storage.locations:
        if each.name == location:
            implementation, settings = storage.place_of(each)
    places = (
        f"{before}{settings[key]}" for key, before in _ADDRESSES.get(implementation, ()) if settings.get(key)
    )  # fmt: skip
    address = next(places, "")
    said = f"store {implementation}" + (f" at {without_secrets(address)}" if address else "")
    return f"{said} (location {location})" if location else said
