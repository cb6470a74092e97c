"""Measures the Fetch walkers and the CRC in one process without I/O: `python -m bench.micro_fetch [seconds per line]`.

Each figure is the best of five rounds, so that other load on the machine matters less.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from uuid import UUID

from kafka.protocol.consumer import FetchRequest

from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.apis.fetch.request import parse_fetch_request, topics_of
from protocol.apis.fetch.response import parse_fetch_response, rebuild_response
from protocol.apis.fetch.scan import plain_topics
from protocol.apis.fetch.stream import PartitionHead, PartitionPatch, StreamingFetchPatcher
from protocol.records.record_batch import iterate_batches, verify_batches
from tests.support.fakes.record_batches import batch_of

VERSION = 17
TOPIC = UUID("12345678-9abc-def0-1234-56789abcdef0")
ROUNDS = 5


class PatchNothing:
    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        return None


class PatchLogStart:
    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        return PartitionPatch(log_start_offset=1)


def seconds_per_call(call: Callable[[], object], seconds: float) -> float:
    best = float("inf")
    for _ in range(ROUNDS):
        calls = 0
        start = time.process_time()
        deadline = start + seconds / ROUNDS
        while (now := time.process_time()) < deadline:
            call()
            calls += 1
        best = min(best, (now - start) / calls)
    return best


def response_of(partitions: int, records: bytes) -> bytes:
    entries = [
        encode_partition(VERSION, p, high_watermark=900, last_stable_offset=900, log_start_offset=0, records=[records])
        for p in range(partitions)
    ]
    return b"".join(encode_response(VERSION, 1, [(TOPIC, entries)]))


def request_of(partitions: int) -> bytes:
    topic = FetchRequest.FetchTopic(
        version=VERSION,
        topic_id=TOPIC,
        partitions=[
            FetchRequest.FetchTopic.FetchPartition(
                version=VERSION, partition=p, fetch_offset=p, partition_max_bytes=1 << 20
            )
            for p in range(partitions)
        ],
    )
    return bytes(
        FetchRequest(version=VERSION, max_wait_ms=500, min_bytes=1, isolation_level=0, topics=[topic]).encode()
    )


def main(seconds: float) -> None:
    print(f"Fetch v{VERSION}, us per message{'':12}{'1':>9}{'10':>9}{'100':>9} partitions")
    requests = [request_of(n) for n in (1, 10, 100)]
    responses = [response_of(n, batch_of(0, 2)) for n in (1, 10, 100)]
    walked = [parse_fetch_response(r, 5, VERSION) for r in responses]
    lines: list[tuple[str, Callable[[int], object]]] = [
        ("request: topics only", lambda i: topics_of(requests[i], 0, VERSION)),
        ("request: parse", lambda i: parse_fetch_request(requests[i], 0, VERSION)),
        ("response: scan", lambda i: plain_topics(responses[i], 5, VERSION)),
        ("response: walk", lambda i: parse_fetch_response(responses[i], 5, VERSION)),
        (
            "response: rebuild, all patched",
            lambda i: rebuild_response(
                walked[i], log_start_offsets=dict.fromkeys(range(len(walked[i].partitions)), 5), session_id=0
            ),
        ),
        (
            "response: stream, none patched",
            lambda i: StreamingFetchPatcher(VERSION, PatchNothing()).feed(memoryview(responses[i])),
        ),
        (
            "response: stream, all patched",
            lambda i: StreamingFetchPatcher(VERSION, PatchLogStart()).feed(memoryview(responses[i])),
        ),
    ]
    for name, call in lines:
        times = [seconds_per_call(lambda i=i, call=call: call(i), seconds) * 1e6 for i in range(3)]  # type: ignore[misc]
        print(f"{name:40}" + "".join(f"{t:9.1f}" for t in times))

    print(f"\nRecord batches, MB/s{'':22}{'1 KiB':>9}{'16 KiB':>9}{'1 MiB':>9} batches")
    logs = []
    for size in (1 << 10, 16 << 10, 1 << 20):
        one = batch_of(0, 1, value_bytes=size - 80)
        logs.append(b"".join(batch_of(i, 1, value_bytes=size - 80) for i in range((4 << 20) // len(one))))
    for name, read in (("iterate", lambda log: list(iterate_batches(log))), ("iterate and CRC", verify_batches)):
        rates = [len(log) / seconds_per_call(lambda log=log, read=read: read(log), seconds) / 1e6 for log in logs]  # type: ignore[misc]
        print(f"{name:40}" + "".join(f"{rate:9.0f}" for rate in rates))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 0.5)
