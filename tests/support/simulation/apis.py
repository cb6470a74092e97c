"""What a simulated broker answers to the requests of Tidegate, but for Fetch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from uuid import UUID

from kafka.protocol.admin import (
    DeleteRecordsResponse,
    DescribeClusterResponse,
    DescribeConfigsResponse,
    ListGroupsResponse,
)
from kafka.protocol.consumer import (
    HeartbeatResponse,
    JoinGroupResponse,
    LeaveGroupResponse,
    ListOffsetsResponse,
    OffsetForLeaderEpochResponse,
    SyncGroupResponse,
)
from kafka.protocol.metadata import FindCoordinatorResponse, MetadataResponse
from kafka.protocol.producer import (
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnResponse,
    EndTxnResponse,
    InitProducerIdResponse,
    ProduceResponse,
    TxnOffsetCommitResponse,
)

from protocol.api_keys import ApiKey
from protocol.errors import ErrorCode
from protocol.records.record_batch import iterate_batches
from tests.support.simulation.cluster import CLUSTER_ID, HOST, PORT, SimBroker, SimCluster, SimPartition, SimTopic
from tests.support.simulation.groups import GroupCoordinator
from tests.support.simulation.log_dirs import log_dirs
from tests.support.simulation.replica_log import ReplicaLog
from tests.support.simulation.topic_admin import create_topics, delete_topics
from tests.support.simulation.transactions import TransactionCoordinator

VERSIONS = {
    0: (3, 11), 1: (4, 17), 2: (1, 8), 3: (0, 12), 8: (2, 8), 9: (1, 8), 10: (0, 4), 11: (2, 9), 12: (0, 4), 13: (0, 5),
    14: (0, 5), 16: (0, 5), 18: (0, 3), 19: (2, 7), 20: (1, 5), 21: (0, 2), 22: (0, 4), 23: (2, 4), 24: (0, 3),
    25: (0, 3), 26: (0, 3), 28: (0, 3), 32: (1, 4), 35: (1, 4), 60: (0, 2),
}  # fmt: skip
_DUPLICATES_KNOWN = 5
_OUT_OF_ORDER_SEQUENCE = 45
_LATEST, _EARLIEST = -1, -2
_GRANTED = DescribeClusterResponse(
    throttle_time_ms=0, error_code=0, error_message=None, cluster_id=CLUSTER_ID, brokers=[],
    authorized_operations={8},  # DESCRIBE
)  # fmt: skip
_TOPIC_OPERATIONS = frozenset({3, 4, 6, 8, 10})
"""READ, WRITE, DELETE, DESCRIBE, DESCRIBE_CONFIGS"""
_NOTHING = UUID(int=0)
Answer = Any
"""A response object, or a future of one."""


class SimApis:
    def __init__(self, cluster: SimCluster, groups: GroupCoordinator, transactions: TransactionCoordinator) -> None:
        self.cluster = cluster
        self.groups = groups
        self.transactions = transactions
        self.on_delete_records: Callable[[SimPartition, SimBroker, int, str], None] = lambda *details: None
        """Called before a deletion with the offset and the client's id."""
        self._known_metadata: dict[Any, tuple[int, Any]] = {}
        self._answers: dict[int, Callable[[SimBroker, Any, str], Answer]] = {
            ApiKey.METADATA: self._metadata,
            ApiKey.PRODUCE: self._produce,
            ApiKey.LIST_OFFSETS: self._list_offsets,
            ApiKey.OFFSET_FOR_LEADER_EPOCH: self._epoch_ends,
            ApiKey.DELETE_RECORDS: self._delete_records,
            ApiKey.CREATE_TOPICS: lambda broker, request, client: create_topics(cluster, broker, request),
            ApiKey.DELETE_TOPICS: lambda broker, request, client: delete_topics(cluster, request),
            ApiKey.DESCRIBE_CONFIGS: self._describe_configs,
            ApiKey.DESCRIBE_LOG_DIRS: lambda broker, request, client: log_dirs(cluster, broker, request),
            10: self._find_coordinator,
            16: lambda broker, request, client: ListGroupsResponse(throttle_time_ms=0, error_code=0, groups=[]),
            60: lambda broker, request, client: _GRANTED,
            11: lambda broker, request, client: self.groups.join(request),
            14: lambda broker, request, client: self.groups.sync(request, client),
            12: lambda broker, request, client: self.groups.heartbeat(request, client),
            13: lambda broker, request, client: self.groups.leave(request),
            22: lambda broker, request, client: self.transactions.init_producer_id(request),
            24: lambda broker, request, client: self.transactions.add_partitions(request),
            25: lambda broker, request, client: self.transactions.add_offsets(request),
            26: lambda broker, request, client: self.transactions.end(request),
            28: self._commit_offsets,
        }

    def answer(self, broker: SimBroker, message: Any, client_id: str) -> Answer:
        key = message.API_KEY
        if key in _COORDINATED and broker is not self.coordinator(_COORDINATED[key]):
            if key == 12 and broker.is_cut_off:
                stale = self.groups.stale_heartbeat(broker.node_id, message)
                if stale is not None:
                    self.groups.confirmed_s[client_id] = self.cluster.loop.time()
                    return stale
            return _refusal(message, ErrorCode.NOT_COORDINATOR)
        return self._answers[key](broker, message, client_id)

    def coordinator(self, key_type: int) -> SimBroker | None:
        """Returns the coordinator: of groups the first live broker, of transactions the last one."""
        live = self.cluster.live_brokers()
        return None if not live else live[-key_type]

    # Cluster

    def _metadata(self, broker: SimBroker, request: Any, client: str) -> Answer:
        """Most requests ask for the same again."""
        names = None if request.topics is None else tuple((one.name, one.topic_id) for one in request.topics)
        key = broker.node_id, names
        known = self._known_metadata.get(key)
        if known is None or known[0] != self.cluster.version:
            known = self._known_metadata[key] = self.cluster.version, self._made_metadata(broker, request)
        return known[1]

    def _made_metadata(self, broker: SimBroker, request: Any) -> Any:
        cluster = self.cluster
        seen = cluster.topics_seen_by(broker)
        answered_topic = MetadataResponse.MetadataResponseTopic
        if request.topics is None:
            topics = [self._described(broker, topic) for topic in seen.values()]
        else:
            topics = []
            for asked in request.topics:
                found = seen.get(asked.name) if asked.name is not None else cluster.topic_by_id(broker, asked.topic_id)
                if found is not None:
                    topics.append(self._described(broker, found))
                else:
                    is_named = asked.name is not None
                    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if is_named else ErrorCode.UNKNOWN_TOPIC_ID
                    topic_id = _NOTHING if is_named else asked.topic_id
                    topics.append(
                        answered_topic(
                            error_code=code, name=asked.name, topic_id=topic_id, is_internal=False, partitions=[]
                        )
                    )  # fmt: skip
        alive = [one for one in cluster.brokers.values() if one.is_up and (broker.is_cut_off or not one.is_cut_off)]
        return MetadataResponse(
            throttle_time_ms=0,
            brokers=[
                MetadataResponse.MetadataResponseBroker(
                    node_id=one.node_id, host=f"{HOST}{one.node_id}", port=PORT, rack=None
                )
                for one in alive
            ],
            cluster_id=CLUSTER_ID,
            controller_id=alive[0].node_id if alive else -1,
            topics=topics,
            error_code=0,
        )

    def _described(self, broker: SimBroker, topic: SimTopic) -> Any:
        described = MetadataResponse.MetadataResponseTopic
        partitions = []
        for partition in topic.partitions:
            view = self.cluster.view(broker, partition)
            partitions.append(
                described.MetadataResponsePartition(
                    error_code=ErrorCode.LEADER_NOT_AVAILABLE if view.leader < 0 else 0,
                    partition_index=partition.index,
                    leader_id=view.leader,
                    leader_epoch=view.leader_epoch,
                    replica_nodes=sorted(partition.replicas),
                    isr_nodes=list(view.isr),
                    offline_replicas=[],
                )
            )
        return described(
            error_code=0, name=topic.name, topic_id=topic.topic_id, is_internal=False, partitions=partitions,
            authorized_operations=_TOPIC_OPERATIONS,
        )  # fmt: skip

    def _describe_configs(self, broker: SimBroker, request: Any, client: str) -> Answer:
        result = DescribeConfigsResponse.DescribeConfigsResult
        entry = result.DescribeConfigsResourceResult
        results = []
        for asked in request.resources:
            topic = self.cluster.topics_seen_by(broker).get(asked.resource_name)
            known: dict[str, str] = {}
            code = 0
            if asked.resource_type == 2:
                if topic is None:
                    code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                else:
                    known = self.cluster.configs_seen_by(broker, topic)
            wanted = known if asked.configuration_keys is None else asked.configuration_keys
            results.append(
                result(
                    error_code=code, error_message=None, resource_type=asked.resource_type,
                    resource_name=asked.resource_name,
                    configs=[
                        entry(name=name, value=known[name], read_only=False, is_default=False, config_source=1,
                              is_sensitive=False, synonyms=[], config_type=0, documentation=None)
                        for name in wanted if name in known
                    ],
                )
            )  # fmt: skip
        return DescribeConfigsResponse(throttle_time_ms=0, results=results)

    def _find_coordinator(self, broker: SimBroker, request: Any, client: str) -> Answer:
        found = self.coordinator(request.key_type)
        if found is None or broker.is_cut_off:
            return FindCoordinatorResponse(
                throttle_time_ms=0, error_code=ErrorCode.COORDINATOR_NOT_AVAILABLE, error_message=None, node_id=-1,
                host="", port=-1,
            )  # fmt: skip
        return FindCoordinatorResponse(
            throttle_time_ms=0, error_code=0, error_message=None, node_id=found.node_id, host=f"{HOST}{found.node_id}",
            port=PORT,
        )  # fmt: skip

    # Logs

    def _found(self, broker: SimBroker, name: str, index: int) -> SimPartition | None:
        topic = self.cluster.topics_seen_by(broker).get(name)
        return topic.partitions[index] if topic is not None and index < len(topic.partitions) else None

    def _list_offsets(self, broker: SimBroker, request: Any, client: str) -> Answer:
        topic_answer = ListOffsetsResponse.ListOffsetsTopicResponse
        answer = topic_answer.ListOffsetsPartitionResponse

        def one(name: str, asked: Any) -> Any:
            partition = self._found(broker, name, asked.partition_index)
            code, offset = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), -1
            if partition is not None:
                code = self.cluster.check_leader(broker, partition, asked.current_leader_epoch)
                log = partition.replicas[broker.node_id]
                if not code and asked.timestamp == _LATEST:
                    if log.high_watermark < self._epoch_start(broker, partition):
                        code = ErrorCode.OFFSET_NOT_AVAILABLE
                    offset = log.last_stable_offset if request.isolation_level == 1 else log.high_watermark
                elif not code:
                    offset = log.start
            return answer(
                partition_index=asked.partition_index, error_code=code, timestamp=-1, offset=-1 if code else offset,
                leader_epoch=-1,
            )  # fmt: skip

        return ListOffsetsResponse(
            throttle_time_ms=0,
            topics=[
                topic_answer(name=topic.name, partitions=[one(topic.name, each) for each in topic.partitions])
                for topic in request.topics
            ],
        )

    def _epoch_start(self, broker: SimBroker, partition: SimPartition) -> int:
        return partition.epoch_start if partition.leader == broker.node_id else 0

    def _epoch_ends(self, broker: SimBroker, request: Any, client: str) -> Answer:
        topic_answer = OffsetForLeaderEpochResponse.OffsetForLeaderTopicResult

        def one(name: str, asked: Any) -> Any:
            partition = self._found(broker, name, asked.partition)
            code, epoch, end = int(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION), -1, -1
            if partition is not None:
                code = self.cluster.check_leader(broker, partition, asked.current_leader_epoch)
                if not code:
                    epoch, end = partition.replicas[broker.node_id].end_offset_for(asked.leader_epoch)
            return topic_answer.EpochEndOffset(
                error_code=code, partition=asked.partition, leader_epoch=epoch, end_offset=end
            )

        return OffsetForLeaderEpochResponse(
            throttle_time_ms=0,
            topics=[
                topic_answer(topic=topic.topic, partitions=[one(topic.topic, each) for each in topic.partitions])
                for topic in request.topics
            ],
        )

    def _delete_records(self, broker: SimBroker, request: Any, client: str) -> Answer:
        """Deletes on the leader at once; the answer waits until the replicas in sync have followed."""
        answered: asyncio.Future[Any] = self.cluster.loop.create_future()
        topic_answer = DeleteRecordsResponse.DeleteRecordsTopicResult
        codes: dict[tuple[str, int], int] = {}
        trimmed: dict[tuple[str, int], SimPartition] = {}
        for topic in request.topics:
            for asked in topic.partitions:
                key = topic.name, asked.partition_index
                partition = self._found(broker, *key)
                if partition is None:
                    codes[key] = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                    continue
                codes[key] = self.cluster.check_leader(broker, partition, None)
                log = partition.replicas[broker.node_id]
                wanted = log.high_watermark if asked.offset == -1 else asked.offset
                if not codes[key] and not 0 <= wanted <= log.high_watermark:
                    codes[key] = ErrorCode.OFFSET_OUT_OF_RANGE
                if not codes[key]:
                    self.on_delete_records(partition, broker, wanted, client)
                    self.cluster.trim(broker, partition, wanted)
                    trimmed[key] = partition
        deadline_ms = self.cluster.loop.now_ms + min(request.timeout_ms, 30_000)

        def low(partition: SimPartition) -> int:
            view = self.cluster.view(broker, partition)
            alive = [node for node in view.isr if node == broker.node_id or (self.cluster.brokers[node].is_up)]
            return min(partition.replicas[node].start for node in alive) if alive else -1

        def finish() -> None:
            if answered.done():
                return
            is_late = self.cluster.loop.now_ms >= deadline_ms
            behind = {key for key, one in trimmed.items() if low(one) < one.replicas[broker.node_id].start}
            if behind and not is_late:
                self.cluster.loop.later(0.01 if not broker.is_cut_off else 1.0, finish)
                return
            for key in behind:
                codes[key] = ErrorCode.REQUEST_TIMED_OUT
            answered.set_result(
                DeleteRecordsResponse(
                    throttle_time_ms=0,
                    topics=[
                        topic_answer(
                            name=topic.name,
                            partitions=[
                                topic_answer.DeleteRecordsPartitionResult(
                                    partition_index=one.partition_index,
                                    low_watermark=-1
                                    if codes[topic.name, one.partition_index]
                                    else low(trimmed[topic.name, one.partition_index]),
                                    error_code=codes[topic.name, one.partition_index],
                                )
                                for one in topic.partitions
                            ],
                        )
                        for topic in request.topics
                    ],
                )
            )

        finish()
        return answered

    # Produce

    def _produce(self, broker: SimBroker, request: Any, client: str) -> Answer:
        (topic,) = request.topic_data
        (data,) = topic.partition_data
        partition = self._found(broker, topic.name, data.index)
        topic_answer = ProduceResponse.TopicProduceResponse

        def made(code: int, base_offset: int, at_ms: int) -> Any:
            return ProduceResponse(
                responses=[
                    topic_answer(
                        name=topic.name,
                        partition_responses=[
                            topic_answer.PartitionProduceResponse(
                                index=data.index, error_code=code, base_offset=base_offset,
                                log_append_time_ms=at_ms, log_start_offset=0, record_errors=[], error_message=None,
                            )
                        ],
                    )
                ],
                throttle_time_ms=0,
                node_endpoints=[],
            )  # fmt: skip

        if partition is None:
            return made(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, -1, -1)
        return self.produce(broker, partition, bytes(data.records), made)

    def produce(
        self, broker: SimBroker, partition: SimPartition, data: bytes, made: Callable[[int, int, int], Any]
    ) -> Answer:
        """Appends a batch with acks=all. `made` makes the answer of an error code, a base offset and a time."""
        code = self.cluster.check_leader(broker, partition, None)
        if code:
            return made(code, -1, -1)
        log = partition.replicas[broker.node_id]
        if len(self.cluster.view(broker, partition).isr) < partition.topic.min_isr:
            return made(ErrorCode.NOT_ENOUGH_REPLICAS, -1, -1)
        view = next(iter(iterate_batches(data)))
        base_offset = -1
        if view.is_transactional:
            if view.producer_id not in log.still_open:
                code = self._verify(broker, partition, view.producer_id, view.producer_epoch)
            if not code:
                code, base_offset = _check_producer(log, view.producer_id, view.producer_epoch, view.base_sequence)
            if code:
                return made(code, -1, -1)
        at_ms = self.cluster.wall_ms() if partition.topic.has_append_time else -1
        if base_offset < 0:
            base_offset = self.cluster.append(broker, partition, data).base_offset
        end = base_offset + view.last_offset + 1 - view.base_offset
        epoch = self.cluster.view(broker, partition).leader_epoch
        answered: asyncio.Future[Any] = self.cluster.loop.create_future()

        def look() -> None:
            if answered.done():
                return
            seen = self.cluster.view(broker, partition)
            if seen.leader != broker.node_id or seen.leader_epoch != epoch:
                answered.set_result(made(ErrorCode.NOT_LEADER_OR_FOLLOWER, -1, -1))
            elif log.high_watermark >= end:
                answered.set_result(made(0, base_offset, at_ms))
            else:
                return
            partition.watchers.remove(look)

        partition.watchers.append(look)
        look()
        return answered

    def _verify(self, broker: SimBroker, partition: SimPartition, producer_id: int, epoch: int) -> int:
        """Asks the coordinator whether the transaction is open, before its first batch (KIP-890)."""
        if broker.is_cut_off:
            return ErrorCode.REQUEST_TIMED_OUT
        return self.transactions.verify(partition, producer_id, epoch)

    def _commit_offsets(self, broker: SimBroker, request: Any, client: str) -> Answer:
        code = self.transactions.verify_offsets(
            request.transactional_id, request.producer_id, request.producer_epoch, request.group_id
        )
        code = code or self.groups.check_member(request.group_id, request.generation_id, request.member_id)
        return _committed(request, code)


_COORDINATED = {11: 0, 12: 0, 13: 0, 14: 0, 28: 0, 22: 1, 24: 1, 25: 1, 26: 1}
"""The kind of coordinator that answers: 0 of groups, 1 of transactions."""


def _check_producer(log: ReplicaLog, producer_id: int, epoch: int, sequence: int) -> tuple[int, int]:
    """Returns an error code, and the base offset of the batch if the log has it already."""
    if log.producer_epochs.get(producer_id, -1) > epoch:
        return ErrorCode.INVALID_PRODUCER_EPOCH, -1
    known = [one for one in log.batches if one.producer_id == producer_id]
    same = [one for one in known if one.producer_epoch == epoch and not one.ends]
    for one in same[-_DUPLICATES_KNOWN:]:
        if one.base_sequence == sequence:
            return 0, one.base_offset
    if same and sequence != same[-1].base_sequence + same[-1].next_offset - same[-1].base_offset:
        return _OUT_OF_ORDER_SEQUENCE, -1
    return 0, -1


def _committed(request: Any, code: int) -> Any:
    topic_answer = TxnOffsetCommitResponse.TxnOffsetCommitResponseTopic
    return TxnOffsetCommitResponse(
        throttle_time_ms=0,
        topics=[
            topic_answer(
                name=topic.name,
                partitions=[
                    topic_answer.TxnOffsetCommitResponsePartition(partition_index=one.partition_index, error_code=code)
                    for one in topic.partitions
                ],
            )
            for topic in request.topics
        ],
    )


def _refusal(message: Any, code: int) -> Any:
    """Returns the answer of a broker that is not the coordinator."""
    match int(message.API_KEY):
        case 11:
            return JoinGroupResponse(
                throttle_time_ms=0, error_code=code, generation_id=-1, protocol_type="", protocol_name="", leader="",
                skip_assignment=False, member_id=message.member_id, members=[],
            )  # fmt: skip
        case 12:
            return HeartbeatResponse(throttle_time_ms=0, error_code=code)
        case 13:
            return LeaveGroupResponse(throttle_time_ms=0, error_code=code, members=[])
        case 14:
            return SyncGroupResponse(
                throttle_time_ms=0, error_code=code, protocol_type="", protocol_name="", assignment=b""
            )
        case 22:
            return InitProducerIdResponse(throttle_time_ms=0, error_code=code, producer_id=-1, producer_epoch=-1)
        case 24:
            result = AddPartitionsToTxnResponse.AddPartitionsToTxnTopicResult
            return AddPartitionsToTxnResponse(
                throttle_time_ms=0, error_code=code, results_by_transaction=[],
                results_by_topic_v3_and_below=[
                    result(
                        name=topic.name,
                        results_by_partition=[
                            result.AddPartitionsToTxnPartitionResult(partition_index=index, partition_error_code=code)
                            for index in topic.partitions
                        ],
                    )
                    for topic in message.v3_and_below_topics
                ],
            )  # fmt: skip
        case 25:
            return AddOffsetsToTxnResponse(throttle_time_ms=0, error_code=code)
        case 26:
            return EndTxnResponse(throttle_time_ms=0, error_code=code)
        case _:
            return _committed(message, code)
