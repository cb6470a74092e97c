"""Stories of lost metadata, of another history, of retention and of topics: what is not known is not called gone."""

from __future__ import annotations

from protocol.errors import ErrorCode
from tests.support.simulation.expectation import Retention
from tests.support.simulation.stories import HOUR_S, MINUTE_S, Story, StoryError, story
from tests.support.simulation.topic_admin import TOPIC_DELETION_DISABLED
from tiers.storage.object_key import parse_segment_key


async def _lose_metadata_of_the_next_segments(on: Story) -> None:
    """The metadata topic loses its tail from now on, and the local state goes. Only objects of segments were written.

    The broker has removed the records of the first segment then."""
    ends, first = on.metadata_ends(), on.end
    on.refuse(lambda verb, key: verb == "PUT" and parse_segment_key(key) is None)
    await on.produce(24)
    await on.copied_to(first + 16)
    copied = on.whole_segments()
    on.retention_removes(first + 8)
    on.kill()
    on.lose_metadata(ends)
    on.accept_all()
    await on.start(keep_state=False)
    await on.passes(30.0)  # until the owner has listed the store
    consumer = on.watch(first)
    await on.passes(10 * MINUTE_S)
    consumer.require_no_reset()
    earliest = await on.earliest()
    if earliest is not None and earliest > first:
        raise StoryError(f"EARLIEST moves from {first} to {earliest}")
    for segment in copied:
        on.require_kept(segment)
    await on.until("no alarm tells that metadata was lost", lambda: "metadata-lost" in on.alarms())


@story()
async def metadata_of_the_first_segments_is_lost(on: Story) -> None:
    """The metadata topic loses its tail with the first segments of a partition, and no process has a state."""
    await on.passes(10.0)
    await _lose_metadata_of_the_next_segments(on)


@story()
async def metadata_of_the_first_segments_after_a_deletion_is_lost(on: Story) -> None:
    """The same with the first segments after a user has deleted all records."""
    await on.produce(16)
    await on.copied_to(8)
    await on.user_deletes(on.end)
    await on.until("the objects of deleted records stay", lambda: not on.whole_segments())
    await on.passes(10.0)
    await _lose_metadata_of_the_next_segments(on)


@story(topic={"segment.bytes": 2_000})
async def an_emptied_broker_that_has_grown_again(on: Story) -> None:
    """A broker is emptied, and its new log is longer than the old one: an alarm tells of the other history."""
    await on.produce(52)
    await on.copied_to(48)
    on.emptied_election(0)
    await on.produce(80)
    on.retention_removes(44)
    await on.passes(2 * MINUTE_S)
    if not on.alarms_so_far() & {"diverged", "cut"}:
        raise StoryError(f"two histories are joined, and the alarms are only {sorted(on.alarms_so_far())}")


@story(topic={"segment.bytes": 2_000})
async def an_emptied_broker_that_is_shorter(on: Story) -> None:
    """A broker is emptied, and its log is shorter than the tier: the partition stops until the log has grown."""
    await on.produce(48)
    await on.copied_to(32)
    copied = on.whole_segments()
    on.emptied_election(0)
    await on.produce(8)
    await on.until("no alarm tells of the other history", lambda: "diverged" in on.alarms())
    await on.passes(2 * MINUTE_S)
    for segment in copied:
        on.require_kept(segment)
    await on.produce(80)
    await on.until("the alarm stays after the CUT", lambda: "diverged" not in on.alarms())
    await on.copied_to(64)
    for segment in copied:
        on.require_kept(segment)


@story(topic={"segment.bytes": 2_000})
async def a_leader_that_has_forgotten_where_its_log_parts(on: Story) -> None:
    """A leader has another history, has removed its first records, and has more records than the tier."""
    await on.produce(48)
    await on.copied_to(32)
    copied = on.whole_segments()
    on.emptied_election(0)
    await on.produce(80)
    on.retention_removes(20)
    await on.until("no alarm tells of the other history", lambda: "diverged" in on.alarms())
    await on.copied_to(64)
    await on.passes(2 * MINUTE_S)
    for segment in copied:
        on.require_kept(segment)
    if "diverged" not in on.alarms():
        raise StoryError("the alarm ends without an operator")


@story()
async def a_leader_that_was_cut_off_before_a_cut(on: Story) -> None:
    """A new owner gets its metadata from a broker that was cut off, and that has the records that a CUT voids."""
    await on.produce(48)
    await on.copied_to(40)
    former = on.partition.leader
    on.cut_off_leader(common_end=16)
    await on.until("no CUT", lambda: "cut" in on.alarms_so_far(), 10 * MINUTE_S)
    for _ in range(4):
        on.kill()
        await on.start()
        await on.passes(MINUTE_S)
    on.rejoin(former)
    await on.produce(48)
    await on.passes(2 * MINUTE_S)
    on.retention_removes(48)
    await on.require_readable()


@story(
    processes=2, total=None, broker_retention=Retention(-1, 11_500),
    topic={"segment.bytes": 3_000, "segment.ms": 5_000, "local.retention.bytes": 0},
)  # fmt: skip
async def size_retention_right_after_a_takeover(on: Story) -> None:
    """A new owner counts the bytes of the local log once, so that size retention deletes nothing in retention."""
    for _ in range(18):
        await on.produce(4)
        await on.passes(6.0)
    await on.produce(22)
    assert on.size_bytes < 11_500
    on.kill()
    await on.start()
    await on.passes(MINUTE_S)
    await on.require_readable()


@story()
async def a_proxy_dies_while_a_topic_is_deleted(on: Story) -> None:
    """A proxy dies after it has forwarded DeleteTopics: the remote log of the topic goes without an operator."""
    await on.produce(24)
    await on.copied_to(16)
    assert await on.user_deletes_topic(and_then=on.kill) is None
    await on.passes(10 * MINUTE_S)
    await on.start()
    await on.until("objects of the deleted topic stay", lambda: not on.whole_segments(), 10 * MINUTE_S)
    if "topics-missing" in on.alarms_so_far():
        raise StoryError("an operator is asked about a topic whose deletion is recorded")


@story(processes=2, broker_retention=Retention(-1, -1))
async def a_topic_that_may_not_be_deleted_is_missing_later(on: Story) -> None:
    """DeleteTopics is refused, and the controllers lose the topic two days later: its remote log stays."""
    await on.produce(24)
    await on.copied_to(16)
    copied = on.whole_segments()
    on.cluster.refuses_deletions = True
    code = await on.user_deletes_topic()
    assert code == TOPIC_DELETION_DISABLED, code
    on.kill()  # no owner ends the record of the request
    await on.passes(48 * HOUR_S)
    on.cluster.lose_topic(on.topic)
    await on.start()
    await on.until("no alarm tells that the topic is missing", lambda: "topics-missing" in on.alarms())
    await on.passes(10 * MINUTE_S)
    for segment in copied:
        on.require_kept(segment)
    on.cluster.bring_back(on.topic)
    await on.require_readable()


@story(topic={"local.retention.bytes": 0})
async def a_former_leader_comes_back(on: Story) -> None:
    """The tier is cut for a leader that wrote nothing, and the former leader comes back with its whole log."""
    await on.produce(48)
    await on.copied_to(40)
    former = on.partition.leader
    following, third = (node for node in on.cluster.brokers if node != former)
    for node in (third, former):
        on.cluster.stop(node)
        await on.passes(5.0)
    on.partition.replicas[following].bring_back(40)
    on.partition.replicas[following].truncate_to(16)
    on.cluster.elect(on.partition, unclean=following)
    on.cluster.start(third)
    await on.until("the tier is not cut", lambda: "cut" in on.alarms_so_far(), 10 * MINUTE_S)
    for node in (following, third):
        on.cluster.stop(node)
    await on.passes(5.0)
    on.cluster.start(former)
    on.cluster.elect(on.partition, unclean=former)
    for node in (following, third):
        on.cluster.start(node)
    await on.passes(15 * MINUTE_S)
    for offset in (16, 31):
        if await on.fetch_code(offset) != ErrorCode.REPLICA_NOT_AVAILABLE:
            raise StoryError(f"a client skips the offsets from {offset} on, which the store has and nobody deleted")
    if "metadata-lost" not in on.alarms():
        raise StoryError("no alarm says that clients wait")
