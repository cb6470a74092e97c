"""Replaces what the product takes from the machine: clocks, randomness, LMDB, and the log of the process."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch
from uuid import UUID

import lmdb
from kafka.protocol.api_message import ApiMessage
from kafka.protocol.data_container import DataContainer
from prometheus_client.metrics import MetricWrapperBase

from protocol.apis.metadata import PartitionColumns
from tests.support.simulation.compaction import DELETE_RETENTION_MS
from tests.support.simulation.loop import VirtualLoop, current_process
from tests.support.simulation.network import HandedOverResponses
from tiers.broker import client, metadata_reads
from tiers.broker.cluster_metadata import Broker, ClusterMetadata, TopicMetadata, not_older
from tiers.metadata.topic import follower, metadata_topic
from tiers.storage.activity import BlockingCalls

_COLLECTIONS = 5
WALL_START_MS = 1_700_000_000_000


async def _handed_over_metadata(
    body: Any, version: int, asked_at_ms: int, last_known: Callable[[UUID], TopicMetadata | None]
) -> ClusterMetadata:
    """Does what `read_cluster_metadata` does with an answer that was never encoded."""
    answer = body.answer
    topics: dict[str, TopicMetadata] = {}
    for topic in answer.topics:
        if topic.name is not None:
            columns = PartitionColumns()
            for one in topic.partitions:
                columns.add(one.error_code, one.partition_index, one.leader_id, one.leader_epoch)
            topic_id = topic.topic_id or UUID(int=0)  # kafka-python decodes the id of an unknown topic as None
            said = TopicMetadata(topic.name, topic_id, columns, topic.is_internal, topic.error_code)
            topics[topic.name] = await not_older(said, last_known(topic_id))
    by_id = {topic.topic_id: topic for topic in topics.values() if topic.topic_id.int}
    brokers = {each.node_id: Broker(each.node_id, each.host, each.port, each.rack) for each in answer.brokers}
    return ClusterMetadata(answer.cluster_id or "", answer.controller_id, brokers, topics, asked_at_ms, by_id)


def _fill(part: Any, *arguments: Any, version: int | None = None, **fields: Any) -> None:
    """Does what `DataContainer.__init__` does for a part of a message that is never encoded."""
    if arguments or version is not None:
        _init(part, *arguments, version=version, **fields)
        return
    for name, value in fields.items():
        setattr(part, name, value)


def _fill_message(message: Any, *arguments: Any, version: int | None = None, **fields: Any) -> None:
    """Does the same for a message."""
    message._header = None
    if arguments or version is not None:
        _init(message, *arguments, version=version, **fields)
        return
    message._version = None
    for name, value in fields.items():
        setattr(message, name, value)


def _labels(metric: Any, *values: Any, **named: Any) -> Any:
    """Does what `MetricWrapperBase.labels` does. Most calls ask for a child that is there."""
    known = metric._metrics.get(values)
    return known if known is not None else _labels_of(metric, *values, **named)


_labels_of: Any = MetricWrapperBase.labels
_init: Any = DataContainer.__init__
for _class in ApiMessage.__subclasses__():  # kafka-python computes these constants at each look-up
    _class.API_KEY, _class.max_version = _class.API_KEY, _class.max_version


@contextmanager
def simulated_environment(loop: VirtualLoop, seed: int, *, has_wire: bool = False) -> Iterator[None]:
    """Within it, `time`, `random`, `os.urandom` and `lmdb.open` are those of the simulation.

    Without a wire, kafka-python makes messages that are handed over and never encoded (`Network.has_wire`)."""
    uuids = random.Random(f"{seed}-uuid")
    lmdb_open = lmdb.open

    def wall_ns() -> int:
        process: Any = current_process.get()
        offset_ms = 0 if process is None else process.wall_offset_ms
        return loop.now_ns + (WALL_START_MS + offset_ms) * 1_000_000

    def opened(*arguments: Any, **options: Any) -> Any:
        environment = lmdb_open(*arguments, **{**options, "sync": False, "metasync": False})
        process: Any = current_process.get()
        if process is not None:
            process.environments.append(environment)
        return environment

    async def called(calls: BlockingCalls, work: Callable[[Any], Any], timeout_s: float | None) -> Any:
        """Does the work in the loop, as `run_in_executor` does. No work of a simulated process is ever abandoned."""
        return await loop.run_in_executor(calls, work, None)

    state = random.getstate()
    random.seed(seed)
    was_collecting = gc.isenabled()
    gc.disable()
    patches: list[Any] = [
        patch.object(time, "monotonic_ns", lambda: loop.now_ns),
        patch.object(time, "clock_gettime_ns", lambda clock: loop.now_ns),
        patch.object(time, "monotonic", loop.time),
        patch.object(time, "time_ns", wall_ns),
        patch.object(time, "time", lambda: wall_ns() / 1e9),
        patch.object(os, "urandom", lambda size: uuids.randbytes(size)),
        patch.object(lmdb, "open", opened),
        patch.object(BlockingCalls, "run", called),
        patch.object(metadata_topic, "MIN_DELETE_RETENTION_MS", DELETE_RETENTION_MS),
        patch.object(follower, "ASK_AFTER_MS", DELETE_RETENTION_MS // 4),
        patch.object(MetricWrapperBase, "labels", _labels),
    ]
    if not has_wire:
        patches.append(patch.object(client, "ResponseClassRegistry", HandedOverResponses))
        patches.append(patch.object(metadata_reads, "read_cluster_metadata", _handed_over_metadata))
        patches.append(patch.object(DataContainer, "__init__", _fill))
        patches.append(patch.object(ApiMessage, "__init__", _fill_message))
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in reversed(patches):
            one.stop()
        random.setstate(state)
        if was_collecting:
            gc.enable()


@contextmanager
def unheard_garbage() -> Iterator[None]:
    """At its end, drops what a run left behind. Its coroutines run their `finally` without a loop; nobody listens."""
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
            for _ in range(_COLLECTIONS):  # a coroutine that waits in its `finally` is garbage only the next time
                if not gc.collect():
                    break
        finally:
            sys.unraisablehook = hook


def never_collect() -> None:
    """Prepares a process that runs a few seeds and then ends without a last word."""
    global _COLLECTIONS
    _COLLECTIONS = 0
    gc.disable()
    sys.unraisablehook = lambda unraisable: None
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
