"""DescribeLogDirs: the sizes of the broker's logs, for a client that may DESCRIBE the cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import DescribeLogDirsRequest, DescribeLogDirsResponse

from protocol.errors import ErrorCode

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = DescribeLogDirsRequest
FOLDER = DescribeLogDirsResponse.DescribeLogDirsResult
_DESCRIBE = 8


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    if _DESCRIBE not in broker.cluster_operations:
        return refused()
    assert request.topics is None, "the client asks for all logs"
    return response({name: sum(map(len, log.batches)) for name, log in broker.logs.items()})


def refused() -> Any:
    """Before version 3, the encoded response has no field for the error."""
    return DescribeLogDirsResponse(throttle_time_ms=0, error_code=ErrorCode.CLUSTER_AUTHORIZATION_FAILED, results=[])


def response(sizes: Mapping[tuple[str, int], int], error: int = ErrorCode.NONE, *, is_future: bool = False) -> Any:
    """Returns the answer of a broker with one folder. A log that moves there from another folder `is_future`."""
    topic = FOLDER.DescribeLogDirsTopic
    topics = [
        topic(
            name=name,
            partitions=[
                topic.DescribeLogDirsPartition(
                    partition_index=index, partition_size=size_bytes, offset_lag=0, is_future_key=is_future
                )
            ],
        )
        for (name, index), size_bytes in sizes.items()
    ]
    folder = FOLDER(error_code=error, log_dir="/data", topics=topics, total_bytes=-1, usable_bytes=-1)
    return DescribeLogDirsResponse(throttle_time_ms=0, error_code=ErrorCode.NONE, results=[folder])
