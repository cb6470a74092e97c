"""DescribeCluster: the rights on the cluster. A broker without an authorizer grants all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kafka.protocol.admin import DescribeClusterRequest, DescribeClusterResponse

if TYPE_CHECKING:
    from tests.support.fakes.broker.scripted_broker import ScriptedBroker

REQUEST = DescribeClusterRequest


async def answer(broker: ScriptedBroker, request: Any) -> Any:
    return DescribeClusterResponse(
        throttle_time_ms=0,
        error_code=0,
        error_message=None,
        cluster_id=broker.cluster_id,
        controller_id=broker.node_id,
        brokers=[],
        authorized_operations=broker.cluster_operations,
    )
