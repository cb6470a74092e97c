"""The safety checks of `tiers/tasks`, each with its place in the code and what the code does without it.

`removed_checks_search` removes one at a time, and says which tests, stories and seeds of the simulation find that. A
check that nothing finds is not needed, or a test is missing.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.mutants.live_functions import first_line
from tests.support.repository import ROOT

_FOLDER = "tiers/tasks"
_ELECTIONS = ("elect", "unclean-election", "out-of-date-replica", "broker-stop", "delete-records", "broker-removes")
_OTHER_HISTORIES = (*_ELECTIONS, "emptied-replica", "log-start-goes-back")
_LOST_METADATA = ("metadata-tail-lost", "power-cut", "old-copy", "broker-removes", "delete-records", "retention")
_OTHER_PLACES = ("store-unmounted", "rebalance", "crash", "retention", "broker-removes")
_OTHER_OWNERS = ("pause", "isolate", "rebalance", "store-late-puts", "retention", "delete-records", "broker-removes")
_SETTINGS = ("reload", "retention", "metadata-tail-lost", "rebalance", "pause")
_STORES = ("store-late", "store-truncates", "store-cut", "store-late-puts", "store-down", "broker-removes")
_TOPICS = ("topic-missing", "clock", "rebalance", "restart", "metadata-cut")
_UNFINISHED = ("crash", "power-cut", "store-lost-answers", "store-cut", "store-down", "rebalance", "broker-removes")
_HISTORIES_OF_ATTEMPTS = (*_ELECTIONS, "crash", "store-lost-answers", "store-down")
_CLOCKS = ("clock", "retention", "pause")


@dataclass(frozen=True, slots=True)
class RemovedCheck:
    """A check, and the code without it: the function returns a value at once, or a piece of its text is replaced."""

    path: str
    qualname: str
    what: str
    """What the check compares or requires."""
    kinds: tuple[str, ...]
    """The kinds of faults that lead to the check."""
    returns: str | None = None
    """An expression that the function returns at once."""
    old: str = ""
    new: str = ""

    @property
    def name(self) -> str:
        place = f"{Path(self.path).stem}:{self.qualname}"
        return place if self.returns is not None else f"{place}: {' '.join(self.old.split())}"

    @property
    def function(self) -> tuple[str, int]:
        return self.qualname, first_line(self._node(ast.parse((ROOT / self.path).read_text())))

    def tree(self, source: str) -> ast.Module:
        """Returns the file without the check. Raises `LookupError` if the file does not have it."""
        if self.returns is None:
            node = self._node(ast.parse(source))
            lines = source.splitlines(keepends=True)
            body = "".join(lines[node.lineno - 1 : node.end_lineno])
            if body.count(self.old) != 1 or self.old.count("\n") != self.new.count("\n"):
                raise LookupError(f"{self.path}: {self.qualname} must have once: {self.old}")
            lines[node.lineno - 1 : node.end_lineno] = [body.replace(self.old, self.new)]
            return ast.parse("".join(lines))
        tree = ast.parse(source)
        node = self._node(tree)
        # The rest stays behind the return, so that the function stays a coroutine and has the same variables.
        returned = ast.Return(ast.parse(self.returns, mode="eval").body)
        node.body.insert(0, ast.copy_location(returned, node.body[0]))
        for each in ast.walk(returned):
            ast.copy_location(each, node.body[1])
        return ast.fix_missing_locations(tree)

    def _node(self, tree: ast.Module) -> ast.FunctionDef | ast.AsyncFunctionDef:
        within: list[ast.stmt] = tree.body
        names = self.qualname.replace(".<locals>", "").split(".")
        found: ast.stmt | None = None
        for name in names:
            found = next(
                (
                    each
                    for each in within
                    if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and each.name == name
                ),
                None,
            )
            within = [] if found is None else found.body
        if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef):
            raise LookupError(f"{self.path} has no function {self.qualname}")
        return found


def _returns(place: str, value: str, what: str, kinds: tuple[str, ...]) -> RemovedCheck:
    path, _, qualname = place.partition(":")
    return RemovedCheck(f"{_FOLDER}/{path}.py", qualname, what, kinds, returns=value)


def _without(place: str, old: str, new: str, what: str, kinds: tuple[str, ...]) -> RemovedCheck:
    path, _, qualname = place.partition(":")
    return RemovedCheck(f"{_FOLDER}/{path}.py", qualname, what, kinds, old=old, new=new)


_CHECKS = (
    # Copies
    _without(
        "copy/copy_task:RLMCopyTask._fill", "if read.leader_epoch != bounds.leader_epoch:", "if False:",
        "only records of the compared leader", _ELECTIONS,
    ),
    _without(
        "copy/copy_task:RLMCopyTask._fill", "builder.base_offset < read.log_start_offset", "False",
        "the spool keeps what the broker removes", _UNFINISHED,
    ),
    _returns(
        "copy/copy_attempts:CopyAttempts._check_history", "None", "the leader has the records before a copy counts",
        _HISTORIES_OF_ATTEMPTS,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts.copy", "asyncio.timeout(limit_ms / 1000)", "asyncio.timeout(None)",
        "a copy ends before its uuid is forgotten", _OTHER_OWNERS,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts.copy", "await self._read_back(segment, progress)", "segment",
        "the objects are read back", _STORES,
    ),
    # Attempts
    _returns("copy/copy_attempts:CopyAttempts.blocking", "None", "no attempt may have the records", _UNFINISHED),
    _returns("copy/copy_attempts:CopyAttempts.may_return", "False", "no member may have the last copy", _UNFINISHED),
    _without(
        "copy/copy_attempts:CopyAttempts.start_behind", "if not (is_kept and ", "if False and (is_kept and ",
        "the spool has the segment before", _UNFINISHED,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts.announce_kept", "await self._renewed(kept) if is_used_up else kept", "kept",
        "a uuid is used once", (*_UNFINISHED, "store-late-puts"),
    ),
    _without(
        "copy/copy_attempts:CopyAttempts._judge", "if now_ms - reading.not_whole_since_ms < visible_after_ms:",
        "if False:", "two reads are T_vis apart", ("store-late", "crash", "rebalance", "broker-removes", "power-cut"),
    ),
    _returns("copy/copy_attempts:CopyAttempts._is_damaged", "False", "the spool's files are intact", _UNFINISHED),
    _returns("copy/copy_attempts:CopyAttempts._has_other_log", "False", "the store has the kept size", _STORES),
    _without(
        "copy/copy_attempts:CopyAttempts._adopt", "self._remote.agrees(found, end)",
        "True", "an attempt continues its neighbours", _HISTORIES_OF_ATTEMPTS,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts._read_back",
        "await self._services.place.require(self._services, [attempt])", "pass",
        "the place that has the objects is the tier's", _OTHER_PLACES,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts._read", "reading.is_given_up", "False", "no deleted attempt is finished",
        _UNFINISHED,
    ),
    _returns(
        "copy/copy_attempts:CopyAttempts.read_again", "None", "an attempt is still not whole before a gap", _UNFINISHED,
    ),
    _returns(
        "copy/copy_attempts:CopyAttempts._has_history", "True", "the leader has an attempt's end",
        _HISTORIES_OF_ATTEMPTS,
    ),
    _returns(
        "copy/copy_attempts:CopyAttempts._is_stored_elsewhere", "True", "the store has the records elsewhere",
        _LOST_METADATA,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts._adds_nothing", "attempt.cut_at is None", "True", "void records stay",
        _HISTORIES_OF_ATTEMPTS,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts.give_up", "attempt.segment_id == self.in_progress", "False",
        "no copy in progress is deleted", _UNFINISHED,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts._is_needless", "age_ms >= KEPT_WITHOUT_RECORDS_MS", "True",
        "an attempt is 12 h old", _UNFINISHED,
    ),
    _without(
        "copy/copy_attempts:CopyAttempts._is_needless", "not reading.is_not_whole", "False", "an attempt is not whole",
        _UNFINISHED,
    ),
    # Histories
    _returns("history/align:check_lineage", "None", "the leader has each leader epoch", _OTHER_HISTORIES),
    _returns("history/align:find_parting", "None", "the leader has the last records", _OTHER_HISTORIES),
    _returns(
        "history/align:require_later_than_cuts", "None", "no leader counts that is older than a CUT", _OTHER_HISTORIES
    ),
    _returns("history/align:_other_begin", "None", "equal epochs begin at equal offsets", _OTHER_HISTORIES),
    _returns("history/align:_deleted_otherwise", "[]", "log starts that contradict the tier", _OTHER_HISTORIES),
    _returns("history/align:require_aligned", "None", "nobody deletes by another history", _OTHER_HISTORIES),
    _returns("history/align:open_cut", "None", "nothing expires below a CUT that is not proved", _OTHER_HISTORIES),
    _without(
        "history/align:align", "bounds.high_watermark > end", "True", "a shorter log stops the partition",
        _OTHER_HISTORIES,
    ),
    _without(
        "history/align:_parting_below", "answer.end_offset > bounds.log_start_offset", "True",
        "the start of a log is no common end", _OTHER_HISTORIES,
    ),
    _returns(
        "history/align:require_later_than_copies", "None", "a CUT voids what the leader disproves", _OTHER_HISTORIES
    ),
    _returns("history/align:RLMCutTask._end_log_starts", "None", "disproved log starts end", _OTHER_HISTORIES),
    _returns("history/align:RLMCutTask._require_kept", "None", "one leader gave all answers", _OTHER_HISTORIES),
    _without(
        "history/align:_ends", "if begun is not None:", "if False:",
        "the leader has the attempts", _HISTORIES_OF_ATTEMPTS,
    ),
    # Gaps
    _returns("history/log_gap_task:LogGapTask._check_trim", "None", "recorded trims explain a hole", _LOST_METADATA),
    _returns("history/log_gap_task:LogGapTask._check_head", "None", "no unknown segment at the head", _LOST_METADATA),
    _returns("history/log_gap_task:LogGapTask._mark_lost", "None", "all processes see the lost head", _LOST_METADATA),
    _without(
        "history/log_gap_task:LogGapTask._behind_hole", "if self._attempts.blocking(*hole) is not None:", "if False:",
        "no attempt may have the hole", _UNFINISHED,
    ),
    _without(
        "history/log_gap_task:LogGapTask._behind_hole",
        "seen_for_ms < services.settings.gap_alarm_ms and not continues_gap", "False",
        "a hole stays for a while", ("delete-records", "slow-link", "lost-answers", "metadata-cut", "pause"),
    ),
    _returns("history/stored_facts:StoredFacts._reads_whole", "False", "no unknown segment in a hole", _LOST_METADATA),
    # The facts and the marker
    _returns(
        "history/stored_facts:FactsTask.check_gap", "None", "no record of a gap was copied", _LOST_METADATA,
    ),
    _returns("history/stored_facts:StoredFacts.lost_reason", "''", "the metadata knows all copies", _LOST_METADATA),
    _returns("history/stored_facts:StoredFacts.lost_positions", "[]", "the topic has its positions", _LOST_METADATA),
    _returns("history/stored_facts:_lacks", "False", "an import lacks settings and log starts", _LOST_METADATA),
    _returns("history/tier_place:TierPlace.require", "None", "the store is the place of the tier", _OTHER_PLACES),
    # Trims
    _returns(
        "retention/trim_task:TrimTask._has_present_settings", "True", "the settings are those of the policy", _SETTINGS
    ),
    _returns(
        "retention/trim_task:TrimTask._stored_to", "target", "the store has what is trimmed",
        (*_STORES, "store-unmounted"),
    ),
    _without(
        "retention/trim_task:TrimTask.run", "if checked_epoch not in (None, bounds.leader_epoch):", "if False:",
        "the leader is the one that was compared", _OTHER_HISTORIES,
    ),
    _without(
        "retention/trim_task:TrimTask.run", "share_start is not None and share_start < target", "False",
        "share groups have read what is trimmed", _ELECTIONS,
    ),
    _without(
        "hold:_trim_hold_of", "if segment.valid_end_offset >= view.last_stable_offset:", "if False:",
        "no trim above the LSO", ("hanging-transaction", *_ELECTIONS),
    ),
    _without(
        "hold:_trim_hold_of",
        "if visible_for_ms is None or visible_for_ms < view.visible_after_ms:", "if visible_for_ms is None:",
        "T_vis has passed", ("slow-link", "metadata-cut", "isolate", "pause", "store-late"),
    ),
    # Expiry
    _returns(
        "retention/expiration_task:RLMExpirationTask._clock_is_trusted", "True", "the clock is right", _CLOCKS
    ),
    _returns(
        "retention/expiration_task:RLMExpirationTask._settings_still_expire", "True", "the settings still expire",
        _SETTINGS,
    ),
    _returns(
        "retention/expiration_task:RLMExpirationTask._check_settings", "None", "the same while the write waits",
        _SETTINGS,
    ),
    _without(
        "retention/expiration_task:RLMExpirationTask.expire",
        "min(expired_to, log_start if remote_end is None else max(log_start, remote_end + 1))", "expired_to",
        "only compared records expire", _OTHER_HISTORIES,
    ),
    _without(
        "retention/expiration_task:RLMExpirationTask._expired_to",
        "if remote.is_head_unknown(log_start, local_log_start):", "if False:",
        "the records before the first segment are remote", _UNFINISHED,
    ),
    _without(
        "retention/expiration_task:RLMExpirationTask._expired_to",
        "segment.start_offset > remote.gone_to(next_offset, local_log_start)", "False",
        "no hole lies between expired segments", _UNFINISHED,
    ),
    _returns(
        "retention/expiration_task:RLMExpirationTask._trouble_without", "None", "the store has the other copies",
        (*_STORES, "crash", "lost-answers"),
    ),
    _without(
        "retention/expiration_task:RLMExpirationTask._superseded",
        "all(at is not None and at <= visible_since_ms for at in seen_at_ms)", "True",
        "T_vis has passed for the other copies", _OTHER_OWNERS,
    ),
    _without(
        "retention/expiration_task:RLMExpirationTask._delete", "if known != segment:", "if False:",
        "the segment is the one that was chosen", _OTHER_HISTORIES,
    ),
    _without(
        "retention/expiration_task:RLMExpirationTask.apply_log_start",
        "log_start <= bounds.last_stable_offset", "log_start",
        "no log start above the LSO is applied", ("hanging-transaction", *_ELECTIONS),
    ),
    _returns("retention/total_retention:_check_unrecorded", "None", "no recorded total is replaced", _SETTINGS),
    # Deletions
    _returns("deletion/remote_disable:_check", "None", "the deletion is still asked for", _SETTINGS),
    _without(
        "deletion/remote_disable:_delete", "await services.present_tier_settings(partition)", "pass",
        "the settings are read to their end", _SETTINGS,
    ),
    _returns("deletion/topic_deletion:TopicDeletionTask._is_idle_for_long", "True", "records end late", _TOPICS),
    _without(
        "deletion/topic_deletion:TopicDeletionTask._record",
        "is_left and self._was_missing_before(topic_id)", "is_left", "the brokers are asked twice", _TOPICS,
    ),
    _without(
        "deletion/topic_deletion:TopicDeletionTask._gone", "if metadata_topic_id in gone:", "if False:",
        "the brokers know the metadata topic", _TOPICS,
    ),
    _without(
        "deletion/segment_deletion:delete_attempts.<locals>.delete",
        "if known is None or known.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED:", "if known is None:",
        "no finished segment is deleted as an attempt", _OTHER_OWNERS,
    ),
    _without(
        "deletion/segment_deletion:_forget.<locals>.delete_again",
        "if services.state.remote_log_segment_metadata_by_id(segment.segment_id) is not None:", "if False:",
        "no announced segment is deleted again", _OTHER_OWNERS,
    ),
    _without(
        "deletion/segment_deletion:forget_deleted_segments", "if abs(skew_ms) > max_skew_ms:", "if False:",
        "the clock is right before a segment is forgotten", _CLOCKS,
    ),
    # Rounds
    _without(
        "partition_tasks:PartitionTasks.find_copy_start", "None if has_announced else start", "start",
        "a survey compares a kept segment first", _HISTORIES_OF_ATTEMPTS,
    ),
    _returns("task_services:TaskServices.require_ownership", "None", "this process owns the partition", _OTHER_OWNERS),
    _without(
        "partition_tasks:PartitionTasks._is_in_effect", "policy == self.policy", "True", "the policy was not replaced",
        _SETTINGS,
    ),
    _without(
        "partition_tasks:PartitionTasks._is_in_effect", "self._may_remove", "True", "no doubt begins meanwhile",
        _LOST_METADATA,
    ),
    _without(
        "partition_tasks:PartitionTasks.expire", "if not self._may_remove or", "if", "nothing expires in doubt",
        _LOST_METADATA,
    ),
    _without(
        "partition_tasks:PartitionTasks.trim", "if self._may_remove:", "if True:", "no trim in doubt", _LOST_METADATA
    ),
    _without(
        "partition_tasks:PartitionTasks.delete", "if not self._may_remove or", "if", "no deletion in doubt",
        _LOST_METADATA,
    ),
    _without(
        "partition_tasks:PartitionTasks.survey", "if bounds.leader_epoch != checked_epoch:", "if False:",
        "one leader through the survey", _OTHER_HISTORIES,
    ),
)  # fmt: skip

CHECKS: Mapping[str, RemovedCheck] = {one.name: one for one in _CHECKS}
