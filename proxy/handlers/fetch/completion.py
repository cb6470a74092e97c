"""Completes a held Fetch response with data of the remote tier, in four steps: judge, read, wait, merge.

The judge decides for each partition of the broker's response. The remote reads run concurrently. If the request also
names local partitions, the completer polls those upstream while it waits. New local data then ends the wait.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from protocol.api_keys import ApiKey
from protocol.apis.fetch.request import FINAL_SESSION_EPOCH, NO_SESSION_ID, FetchPartition
from protocol.apis.fetch.request import patch_fetch_request as patch
from protocol.apis.fetch.response import (
    LOG_START_OFFSET_AT,
    FetchResponse,
    parse_fetch_response,
)
from protocol.errors import ErrorCode, ProtocolError
from protocol.header import response_body_position
from protocol.primitives import INT64, Buffer
from protocol.steps import Steps
from proxy.handlers.base import UNAVAILABLE, HandlerTools, fetch_error
from proxy.handlers.fetch.behind_gaps import BehindGaps, is_within_gap
from proxy.handlers.fetch.delayed import DelayedRemoteFetch, DelayedRemoteFetchPurgatory, RemotePartitionRead
from proxy.handlers.fetch.held import FetchConnectionStates, HeldFetch, PartitionKey
from proxy.handlers.fetch.local import LocalAnswers, endpoint_splices
from proxy.handlers.fetch.merge import LocalReplacement, RemoteOutcome, merge, split_max_bytes
from proxy.handlers.fetch.verdict import FetchJudge, Judgement, Verdict
from proxy.handlers.turns import STEPS_OF_A_LOOK_UP, in_turns, slices_of
from proxy.wire.exchange import BrokerGoneError
from tiers.errors import BrokerError, OffsetBelowLogStartError, OffsetGapError, RemoteLogError
from tiers.model.ids import TopicIdPartition
from tiers.tracing import spanned

logger = logging.getLogger(__name__)

_UNAVAILABLE = "where the records are is not known now: no fresh metadata, no answer of the leader, or a pause"
_DEADLINE_GRACE_MS = 50
"""A read whose deadline is that of the answer knows whether it failed or was only slow. This grace lets it report."""


@dataclass(slots=True)
class _JudgedFetch:
    """A held Fetch, the broker's response to it, and the parts of its answer so far, by index in the response."""

    held: HeldFetch
    response: FetchResponse
    judgements: Mapping[int, Judgement]
    behind_gaps: Mapping[int, RemoteOutcome]
    reads: dict[int, RemotePartitionRead] = field(default_factory=dict)
    idle: dict[PartitionKey, int] = field(default_factory=dict)
    """The indexes of the partitions that the broker answered itself, and that have no records and no error so far."""
    replacements: dict[int, LocalReplacement] = field(default_factory=dict)
    """The broker's later answers for the idle partitions."""

    @property
    def local_bytes(self) -> int:
        """The size of the records in both of the broker's answers together."""
        return sum(entry.records_bytes for entry in self.response.partitions) + sum(
            outcome.records_bytes for outcome in self.behind_gaps.values()
        )


@dataclass(slots=True)
class RemoteReadCounts:
    """What the answers to clients got from the remote tier: reads of a partition, those that failed, and records."""

    requests: int = 0
    errors: int = 0
    size_bytes: int = 0

    def count(self, reads: Iterable[RemotePartitionRead], outcomes: Iterable[RemoteOutcome]) -> None:
        for read in reads:
            self.requests += 1
            self.errors += read.error is not None
        self.size_bytes += sum(0 if outcome.read is None else outcome.read.size_bytes for outcome in outcomes)


class FetchCompleter:
    def __init__(
        self,
        tools: HandlerTools,
        judge: FetchJudge,
        local: LocalAnswers,
        connections: FetchConnectionStates,
        purgatory: DelayedRemoteFetchPurgatory,
    ) -> None:
        self._tools = tools
        self._judge = judge
        self._behind_gaps = BehindGaps(tools, local)
        self._local = local
        self._connections = connections
        self._purgatory = purgatory
        self.counts = RemoteReadCounts()

    async def complete(self, held: HeldFetch, response: FetchResponse) -> Sequence[Buffer]:
        if held.trace is not None:
            held.trace.on_broker_answer(response)
        payload = await self._complete(held, response)
        held.grant.resize(sum(map(len, payload)))
        for key, read in held.reads.items():
            if not read.is_done:
                self._connections.get(held.exchange.connection_id).keep(key, read, held.grant)
        return payload

    async def _complete(self, held: HeldFetch, response: FetchResponse) -> Sequence[Buffer]:
        if response.error_code or not response.partitions:
            payload = await in_turns(self._local.relay(response, held.exchange.address_of))
            if held.trace is not None:
                held.trace.on_answer(payload, (), response.error_code)
            return payload
        log_starts = await in_turns(self._local.log_start_offsets(response))
        with spanned(None if held.trace is None else held.trace.judging()) as judging:
            judgements = await self._judge.judge(held, response)
            if judging is not None:
                judging.set_attribute("tidegate.verdicts", sorted({each.verdict.value for each in judgements.values()}))
        tiered = any(
            judgement.is_tiered and judgement.verdict is not Verdict.RELAY for judgement in judgements.values()
        )
        behind_gaps = await self._behind_gaps.ask(held, response, judgements)
        fetch = _JudgedFetch(held, response, judgements, behind_gaps)
        await in_turns(self._start_reads(fetch))
        await self._wait(fetch)
        outcomes = await in_turns(self._outcomes(fetch))
        self.counts.count(fetch.reads.values(), outcomes.values())
        if any(read.result is not None for read in fetch.reads.values()):
            held.exchange.tier = "remote"
        if tiered:
            self._remember(fetch)
        payload = await in_turns(
            merge.steps(
                response,
                outcomes,
                max_bytes=min(held.request.max_bytes, self._tools.settings.fetch_max_bytes),
                is_read_committed=held.request.is_read_committed,
                local=fetch.replacements,
                log_start_offsets=log_starts,
                session_id=NO_SESSION_ID if tiered else None,
                splices=await in_turns(endpoint_splices(response, held.exchange.address_of)),
            )
        )
        if held.trace is not None:
            held.trace.on_answer(payload, outcomes.values())
        return payload

    def _start_reads(self, fetch: _JudgedFetch) -> Steps[None]:
        """Collects the remote reads: the running ones, and the new ones that it starts."""
        held, response, judgements, reads = fetch.held, fetch.response, fetch.judgements, fetch.reads
        request = held.request
        place: dict[PartitionKey, int] = {}
        for number, asked in enumerate(request.partitions):
            place[asked.topic, asked.partition] = number
            yield
        unforeseen: dict[int, int] = {}
        used_bytes = fetch.local_bytes
        for index, judgement in judgements.items():
            yield
            entry = response.partitions[index]
            if judgement.verdict is Verdict.UNAVAILABLE and judgement.partition is not None:
                at = place.get((entry.topic, entry.partition))
                if at is not None:
                    offset = request.partitions[at].fetch_offset
                    self._tools.waiting.asked(held.client_id, judgement.partition, offset, _UNAVAILABLE)
            if judgement.verdict is not Verdict.REMOTE or judgement.partition is None:
                continue
            number = place[entry.topic, entry.partition]
            running = held.reads.get((entry.topic, entry.partition))
            # A read that found no segment is not used: it began before the metadata was known to be fresh.
            if (
                running is not None
                and (running.request.partition, running.request.offset) == (judgement.partition, judgement.position)
                and not isinstance(running.error, (OffsetBelowLogStartError, OffsetGapError))
            ):
                reads[index] = running
                used_bytes += running.request.max_bytes
                continue
            if running is not None:
                running.cancel()
            unforeseen[number] = index
        has_running = bool(reads)
        budgets = split_max_bytes(request.partitions, unforeseen, max(0, held.grant.max_bytes - used_bytes))
        for number, budget in budgets.items():
            yield from STEPS_OF_A_LOOK_UP
            index = unforeseen[number]
            judgement = judgements[index]
            assert judgement.partition is not None
            key = (response.partitions[index].topic, response.partitions[index].partition)
            budget = budget._replace(min_one_message=budget.min_one_message and not has_running)
            wanted = held.read_request(judgement.partition, judgement.position, budget)
            reads[index] = held.reads[key] = RemotePartitionRead(self._tools.waiting, self._tools.spawn, wanted)

    async def _wait(self, fetch: _JudgedFetch) -> None:
        held, response, behind_gaps = fetch.held, fetch.response, fetch.behind_gaps
        must_answer = False
        has_local = False
        has_unavailable = False
        async for indexes in slices_of(range(len(response.partitions))):
            for index in indexes:
                entry, judgement = response.partitions[index], fetch.judgements.get(index)
                if judgement is None:
                    has_local = True
                    must_answer = must_answer or bool(entry.error_code)
                    if not entry.error_code and not entry.records_bytes and entry.preferred_read_replica < 0:
                        fetch.idle[entry.topic, entry.partition] = index
                    must_answer = must_answer or entry.preferred_read_replica >= 0
                elif judgement.verdict is Verdict.LOCAL:
                    has_local = True
                    behind_gap = behind_gaps.get(index)
                    if behind_gap is not None and behind_gap.replacement is not None:
                        must_answer = must_answer or not behind_gap.records_bytes
                    elif behind_gap is not None and behind_gap.error_code:
                        has_unavailable = True
                elif judgement.verdict is Verdict.UNAVAILABLE:
                    has_unavailable = True
                elif judgement.verdict is not Verdict.REMOTE:
                    must_answer = True
        if not fetch.judgements and not held.is_sessionless:
            return
        operation = DelayedRemoteFetch(
            list(fetch.reads.values()),
            self._tools.clock_ms,
            min_bytes=min(held.request.min_bytes, held.request.max_bytes),
            local_bytes=fetch.local_bytes,
            must_answer=must_answer,
            has_unavailable=has_unavailable,
            max_wait_at_ms=held.max_wait_at_ms,
            deadline_ms=held.max_wait_at_ms if has_local else held.answer_at_ms + _DEADLINE_GRACE_MS,
        )
        with spanned(None if held.trace is None else held.trace.waiting(operation.reads)) as waiting:
            completion = await self._purgatory.wait(operation, partial(self._poll_local, fetch, operation))
            if waiting is not None:
                waiting.set_attribute("tidegate.completion", completion.value)

    async def _poll_local(self, fetch: _JudgedFetch, operation: DelayedRemoteFetch) -> None:
        """Polls the idle local partitions upstream until the operation completes.

        The polls are short slices: a response that becomes complete waits for one slice at most, and the client's next
        request waits upstream behind one slice at most.
        """
        held, request = fetch.held, fetch.held.request
        while fetch.idle and not operation.is_satisfied():
            wait_ms = min(self._tools.settings.local_poll_ms, held.max_wait_at_ms - self._tools.clock_ms())
            if wait_ms <= 0:
                return
            kept: set[int] = set()
            async for part in slices_of(range(len(request.partitions))):
                entries = ((n, request.partitions[n]) for n in part)
                kept.update(n for n, entry in entries if (entry.topic, entry.partition) in fetch.idle)
            if not kept:
                return
            frame = await in_turns(request.with_only(kept))
            patch(
                frame,
                request.body_position,
                request.version,
                max_wait_ms=wait_ms,
                min_bytes=max(1, request.min_bytes - operation.local_bytes),
                max_bytes=max(1, min(self._tools.settings.hold_bytes, request.max_bytes - operation.local_bytes)),
                session_id=NO_SESSION_ID,
                session_epoch=FINAL_SESSION_EPOCH,
            )
            asked = held.exchange.try_forward(bytes(frame))
            if asked is None:
                return
            try:
                payload = await asked
                body_position = response_body_position(ApiKey.FETCH, request.version, payload)
                answer = await in_turns(parse_fetch_response.steps(payload, body_position, request.version))
            except BrokerGoneError:
                return  # the records of the remote tier still leave
            except ProtocolError as error:
                logger.warning("the broker's answer to the second poll of local partitions cannot be read: %s", error)
                return
            if not await in_turns(self._take_local(answer, fetch, operation)):
                return
            operation.wake()

    def _take_local(self, answer: FetchResponse, fetch: _JudgedFetch, operation: DelayedRemoteFetch) -> Steps[bool]:
        """Takes the new records and errors from a poll's answer. False: the broker throttles or refused; stop polling.

        A throttled answer has no partitions, and a refusal has a top-level error code."""
        log_starts = yield from self._local.log_start_offsets(answer)
        for number, entry in enumerate(answer.partitions):
            yield
            key = (entry.topic, entry.partition)
            index = fetch.idle.get(key)
            if index is None or (not entry.error_code and not entry.records_bytes):
                continue
            del fetch.idle[key]
            if entry.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
                continue  # the broker trimmed since its first answer, which stays; the next request is judged again
            buffers: list[Buffer] = [answer.payload[entry.start : entry.end]]
            if number in log_starts:
                patched = bytearray(answer.payload[entry.start : entry.end])
                INT64.pack_into(patched, LOG_START_OFFSET_AT, log_starts[number])
                buffers = [patched]
            fetch.replacements[index] = LocalReplacement(buffers, entry.records_bytes)
            operation.local_bytes += entry.records_bytes
            operation.must_answer = operation.must_answer or bool(entry.error_code)
        return not answer.error_code and bool(answer.partitions)

    def _outcomes(self, fetch: _JudgedFetch) -> Steps[dict[int, RemoteOutcome]]:
        asked: dict[PartitionKey, FetchPartition] = {}
        for one in fetch.held.request.partitions:
            asked[one.topic, one.partition] = one
            yield
        version, outcomes = fetch.response.version, dict[int, RemoteOutcome]()
        for index, judgement in fetch.judgements.items():
            yield from STEPS_OF_A_LOOK_UP
            entry = fetch.response.partitions[index]
            outcome = fetch.behind_gaps.get(index) or self._outcome(
                version, judgement, asked.get((entry.topic, entry.partition)), fetch.reads.get(index)
            )
            if outcome is not None:
                outcomes[index] = outcome
        return outcomes

    def _outcome(
        self, version: int, judgement: Judgement, asked: FetchPartition | None, read: RemotePartitionRead | None
    ) -> RemoteOutcome | None:
        """Returns the outcome of one partition. None: the proxy relays the broker's entry."""
        partition = judgement.partition
        if judgement.verdict is Verdict.RELAY:
            return None
        if judgement.verdict is Verdict.UNAVAILABLE or partition is None:
            return RemoteOutcome(error_code=UNAVAILABLE)
        try:
            log_start = self._local.log_start(partition)
            end_offset = self._tools.log.remote(partition).end()
        except RemoteLogError as error:
            return RemoteOutcome(error_code=fetch_error(error))
        self._keep_watermarks_young(partition)
        outcome = RemoteOutcome(
            watermarks=self._tools.bounds.watermarks_above(partition, end_offset),
            log_start_offset=log_start,
            diverging_epoch=judgement.diverging_epoch,
        )
        if read is None:
            return outcome
        if read.error is not None:
            return replace(outcome, error_code=fetch_error(read.error))
        found = read.result
        if found is None or not found.records or asked is None:
            return replace(outcome, read=found)
        if is_within_gap(asked, judgement.position, found.first_offset):
            found = self._behind_gaps.across(version, judgement, asked)
        return replace(outcome, read=found)

    def _keep_watermarks_young(self, partition: TopicIdPartition) -> None:
        """Asks the leader again for the watermarks that the next answers tell, if the known ones are old.

        A consumer that reads the remote tier for hours needs no bounds of the local log meanwhile."""
        bounds, settings = self._tools.bounds, self._tools.settings
        not_before_ms = self._tools.clock_ms() - settings.watermarks_max_age_ms
        known = bounds.verified(partition)
        if known is not None and known.asked_at_ms >= not_before_ms:
            return

        async def ask() -> None:
            with contextlib.suppress(BrokerError):  # the answers go on telling the known watermarks
                await bounds.ask(partition, not_before_ms, settings.bounds_timeout_ms)

        self._tools.spawn(ask())

    def _remember(self, fetch: _JudgedFetch) -> None:
        connection = self._connections.get(fetch.held.exchange.connection_id)
        for index, judgement in fetch.judgements.items():
            if judgement.is_tiered:
                entry = fetch.response.partitions[index]
                connection.authorized_topics.add(entry.topic)
                if judgement.verdict is Verdict.UNSEEN:
                    connection.just_seen.add((entry.topic, entry.partition))
        if fetch.response.session_id:
            connection.orphaned_session_id = fetch.response.session_id
