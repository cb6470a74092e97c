"""What does the modelled store cost, and how exactly does it keep its delay and its rate?

Eight connections read ranges of 8 MiB from the S3 server, directly and through the relay without a model. The relay's
CPU seconds are what the benchmark itself adds to the machine. Then one connection reads through each model.
"""

from __future__ import annotations

import asyncio
import http.client
import statistics
import threading
import time
from urllib.parse import urlsplit

from botocore.auth import S3SigV4QueryAuth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Processes, Watch
from bench.measure.results import ScenarioResult, reading
from bench.rig.modelled_store import ModelledStore
from bench.rig.stage import BUCKET, Stage, processes_of
from bench.rig.store_model import FAR, NEAR, PLAIN
from tests.support.servers.versitygw import ACCESS_KEY_ID, SECRET_ACCESS_KEY

KEY = "store-model"
MIB = 1 << 20
OBJECT_MIB = 64
RANGE_BYTES = 8 * MIB
CONNECTIONS = 8
WINDOW_S = 2.0
GETS = 4
CASE = "8 connections"


def presigned(endpoint_url: str) -> str:
    """Returns the address of the object, signed for a GET through that endpoint. Any range may be asked for."""
    request = AWSRequest("GET", f"{endpoint_url}/{BUCKET}/{KEY}")
    S3SigV4QueryAuth(Credentials(ACCESS_KEY_ID, SECRET_ACCESS_KEY), "s3", "us-east-1", 600).add_auth(request)
    return str(request.url)


class Reader:
    """A connection that reads ranges one after the other."""

    def __init__(self, endpoint_url: str) -> None:
        parts = urlsplit(presigned(endpoint_url))
        self._target = f"{parts.path}?{parts.query}"
        self._connection = http.client.HTTPConnection(parts.netloc, timeout=60)
        self._buffer = bytearray(RANGE_BYTES)

    def read(self, number: int) -> tuple[float, float]:
        """Reads one range. Returns the seconds to its first byte, and those of all its bytes behind that."""
        first = number * RANGE_BYTES % (OBJECT_MIB * MIB)
        began = time.perf_counter()
        self._connection.request("GET", self._target, headers={"Range": f"bytes={first}-{first + RANGE_BYTES - 1}"})
        answer = self._connection.getresponse()
        answered = time.perf_counter()
        if answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            raise RuntimeError(f"the store answered {answer.status}")
        view = memoryview(self._buffer)
        while view:
            view = view[answer.readinto(view) :]
        answer.read()
        return answered - began, time.perf_counter() - answered

    def close(self) -> None:
        self._connection.close()


def read_together(endpoint_url: str, seconds: float) -> int:
    """Reads on several connections for a while. Returns the bytes."""
    until = time.monotonic() + seconds
    done: list[int] = []

    def one(first: int) -> None:
        reader = Reader(endpoint_url)
        number = first
        while time.monotonic() < until:
            reader.read(number)
            done.append(RANGE_BYTES)
            number += 1
        reader.close()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(CONNECTIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done)


async def put_object(stage: Stage) -> None:
    async with stage.s3.client() as client:
        await client.put_object(Bucket=BUCKET, Key=KEY, Body=bytes(OBJECT_MIB * MIB))


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    endpoints = {"S3 server": stage.s3.endpoint_url}
    servers: dict[str, Processes] = {"s3": processes_of(stage.s3)}
    asyncio.run(put_object(stage))
    with ModelledStore(stage.s3.port, PLAIN) as relay:
        endpoints["S3 server behind the relay"] = relay.endpoint_url
        servers["relay"] = processes_of(relay)
        for number in range(stage.size.rounds):
            for name, endpoint_url in endpoints.items():
                with Watch(servers) as watch:
                    count = read_together(endpoint_url, WINDOW_S)
                figures = {"mb_per_s": count / watch.span.seconds / 1e6}
                for server, cpu_s in watch.span.cpu_s.items():
                    if server == "s3" or endpoint_url == relay.endpoint_url:
                        figures[f"{server}_cpu_s_per_gib"] = cpu_s / count * (1 << 30)
                result.readings.append(reading(CASE, name, number, figures, watch.span))
    for model in (FAR, NEAR):
        reader = Reader(stage.modelled(model).endpoint_url)
        with Watch({}) as watch:
            times = [reader.read(number) for number in range(GETS)]
        reader.close()
        figures = {
            "first_byte_ms": statistics.median(first for first, _ in times) * 1000,
            "mb_per_s": RANGE_BYTES / statistics.median(rest for _, rest in times) / 1e6,
        }
        result.readings.append(reading(f"one connection, {model}", "modelled store", 0, figures, watch.span))
    return result


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
