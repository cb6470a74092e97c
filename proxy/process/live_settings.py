"""`LiveSettings`: the settings of a process that are in effect, and the parts that follow them through reloads.

A part follows from the moment at which it is opened. So a reload during the start is not lost, and no part begins with
settings that are not in effect any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from proxy.config import TidegateConfig
from tiers.config.topic_policy import TopicConfig

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
