"""The settings of a process that are in effect, and their change while it runs, at SIGHUP or by the admin port.

The log level, `[limits]`, `[[topics]]` and the quotas for copies and fetches apply at once. A limit that a connection
takes over when it opens applies to new connections. The log names all other settings that have changed: they need a
restart. Settings that are wrong change nothing. The topics need a restart if the process began without a remote tier:
it has no store.

The parts of the process follow `LiveSettings`, each from the moment at which it is opened. So a reload during the start
is not lost, and no part begins with settings that are not in effect any more.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from pydantic import BaseModel

from proxy.config import TidegateConfig
from tiers.config.setting_keys import key_of, own_fields, section_of
from tiers.config.settings import Section
from tiers.config.tier_config import ConfigError
from tiers.config.topic_policy import TopicConfig

logger = logging.getLogger(__name__)

_FIXED_LIMIT = "held.messages.max.bytes"
_QUOTAS = ("remote.log.manager.copy.", "remote.log.manager.fetch.")
"""How the keys of the quotas at the top of the file begin."""

Follower = Callable[[TidegateConfig], None]
"""Applies the settings that need no restart. Does not wait, and must not raise."""


class LiveSettings:
    def __init__(self, config: TidegateConfig) -> None:
        self._config = config
        self._followers: list[Follower] = []

    @property
    def config(self) -> TidegateConfig:
        """The settings that are in effect."""
        return self._config

    def rules(self) -> Sequence[TopicConfig]:
        """Returns the rules of the topics that are in effect. A decision takes them once."""
        return self._config.topics

    def follow(self, stack: AsyncExitStack, follower: Follower) -> None:
        """Calls `follower` now, and after every change until the stack closes."""
        follower(self._config)
        self._followers.append(follower)
        stack.callback(self._followers.remove, follower)

    def change(self, config: TidegateConfig) -> None:
        """Puts settings into effect. No other task runs before all parts have applied them."""
        self._config = config
        for follower in tuple(self._followers):
            follower(config)


@dataclass(frozen=True, slots=True)
class Reloaded:
    """What became of the settings: the keys that apply now, and those that need a restart. With `mistake`, nothing."""

    applied: tuple[str, ...] = ()
    need_restart: tuple[str, ...] = ()
    mistake: str = ""


def hold_reloads() -> None:
    """Lets SIGHUP wait until `take_reloads`. Without a handler, the signal would end the process."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})


def take_reloads() -> None:
    """Call it when the signal has a handler. The handler gets the signal that waits."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})


class Reload:
    """`config` are the settings of the process, and `load` reads them again. `apply` gets those that apply now."""

    def __init__(
        self,
        config: TidegateConfig,
        load: Callable[[], TidegateConfig],
        apply: Callable[[TidegateConfig], None],
    ) -> None:
        self._config = config
        self._load = load
        self._apply = apply
        self.trouble = ""
        """Why the settings could not be read the last time; empty if they were."""

    @property
    def config(self) -> TidegateConfig:
        """The settings that are in effect."""
        return self._config

    def __call__(self) -> Reloaded:
        try:
            read = self._load()
        except ConfigError as error:
            self.trouble = str(error)
            logger.error("the settings are not reloaded, because they are wrong: %s", error)
            return Reloaded(mistake=str(error))
        self.trouble = ""
        changed = list(changed_keys(self._config, read))
        now = tuple(key for key in changed if is_live(key, is_tiered=self._config.is_tiered))
        later = tuple(key for key in changed if key not in now)
        self._config = with_live_settings(self._config, read)
        self._apply(self._config)
        logger.info("the settings are reloaded: %s", f"changed {', '.join(now)}" if now else "no change applies now")
        if later:
            logger.warning("these changed settings need a restart: %s", ", ".join(later))
        return Reloaded(now, later)


def is_live(key: str, *, is_tiered: bool = True) -> bool:
    """Whether a change of this setting applies at once. `key` has the form of `changed_keys`."""
    section, _, name = key.partition(" ")
    is_live_limit = section == "[limits]" and name != _FIXED_LIMIT
    return key == "[log] level" or is_live_limit or key.startswith(_QUOTAS) or (key == "[[topics]]" and is_tiered)


def with_live_settings(config: TidegateConfig, read: TidegateConfig) -> TidegateConfig:
    """Returns `config` with those settings of `read` that need no restart."""
    return config.model_copy(
        update={
            "log": _with_fields(config.log, read.log, lambda key: key == "level"),
            "limits": _with_fields(config.limits, read.limits, lambda key: key != _FIXED_LIMIT),
            "remote_log": _with_fields(config.remote_log, read.remote_log, lambda key: key.startswith(_QUOTAS)),
            "topics": read.topics if config.is_tiered else config.topics,
        }
    )


def _with_fields(before: Section, after: Section, is_live: Callable[[str], bool]) -> Section:
    """Returns `before` with the live fields of `after` that differ. The others keep their source, such as the file."""
    changed = {
        name: getattr(after, name)
        for name, field in own_fields(type(before)).items()
        if is_live(key_of(name, field)) and getattr(before, name) != getattr(after, name)
    }
    return before.model_copy(update=changed)


def changed_keys(before: TidegateConfig, after: TidegateConfig) -> Iterator[str]:
    """Yields the settings that differ. A list of sections, such as `[[topics]]`, counts as one setting."""
    for name in TidegateConfig.model_fields:
        is_top = name == "remote_log" or name not in TidegateConfig.section_models()
        yield from _differences("" if is_top else name, name, getattr(before, name), getattr(after, name))


def _differences(section: str, name: str, before: object, after: object) -> Iterator[str]:
    if before == after:
        return
    if not isinstance(before, BaseModel) or type(before) is not type(after):
        is_list = isinstance(before, tuple) and section
        yield f"[[{section}]]" if is_list else f"[{section}]" if section else name
        return
    for field_name, field in type(before).model_fields.items():
        old, new = getattr(before, field_name), getattr(after, field_name)
        if old == new:
            continue
        if section_of(field) is not None:
            yield from _differences(f"{section}.{field_name}", field_name, old, new)
        else:
            yield f"[{section}] {key_of(field_name, field)}" if section else key_of(field_name, field)
