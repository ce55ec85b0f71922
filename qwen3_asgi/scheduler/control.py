"""Commands that change what the model is: LoRA adapters come and go at run time.

A command is carried out between two steps, when no live request is left that it would pull the
ground from under. Who arrives behind it and depends on it waits in `post_control_deferred`; all
others go on. Loading an adapter that nobody can be using yet thus waits for nobody.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.request import Request, State

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from qwen3_asgi.scheduler.executor import ModelExecutor
    from qwen3_asgi.scheduler.queues import QueueTable

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Control:
    """One command. `adapter` is the one it changes; None concerns every request.

    `apply` gets the executor and the adapters by name; what it raises goes into `done`.
    """

    apply: Callable[[ModelExecutor, dict[str, str]], None]
    done: Future[None]
    adapter: str | None = None
    number: int = field(default=0, init=False)

    def concerns(self, request: Request) -> bool:
        return self.adapter is None or request.adapter == self.adapter

    def refuse(self, error: Exception) -> None:
        """It will not be carried out."""
        if not self.done.done() and self.done.set_running_or_notify_cancel():
            self.done.set_exception(error)


class Controls:
    """Pending commands and the adapters there are. Owned by the scheduler thread."""

    def __init__(self, executor: ModelExecutor, queues: QueueTable) -> None:
        self._executor = executor
        self._queues = queues
        self._pending: deque[Control] = deque()
        self._count = 0
        # name -> fingerprint of its weights, which is part of its requests' prefix-cache addresses.
        self._adapters: dict[str, str] = {}

    @property
    def adapters(self) -> Mapping[str, str]:
        return self._adapters

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def add(self, control: Control) -> None:
        self._count += 1
        control.number = self._count
        self._pending.append(control)

    def must_wait(self, request: Request) -> bool:
        """Whether a command is pending that came before this request and concerns it."""
        return any(
            control.number <= request.controls_before and control.concerns(request)
            for control in self._pending
        )

    def arrive(self, request: Request) -> None:
        """Whatever comes from now on comes after this request, and after all of its forks."""
        parent = request.fork_of
        if parent is not None and parent.state is not None:
            request.controls_before = parent.controls_before
        else:
            request.controls_before = self._count

    def apply_due(self) -> list[Request]:
        """Carry out what nobody stands in the way of; returns who need not wait any more, in order.

        In order of arrival as far as they concern the same adapter.
        """
        if not self._pending:
            return []
        kept: list[Control] = []
        for control in self._pending:
            blocked = any(_same_concern(control, earlier) for earlier in kept)
            if blocked or self._in_use(control):
                kept.append(control)
            else:
                self._apply(control)
        self._pending = deque(kept)
        return [r for r in self._queues[State.POST_CONTROL_DEFERRED] if not self.must_wait(r)]

    def refuse(self, error: Exception) -> None:
        """The loop ends: nobody will carry them out."""
        while self._pending:
            self._pending.popleft().refuse(error)

    def _in_use(self, control: Control) -> bool:
        """Whether a live request that came before the command depends on what it changes.

        That may also be one that is held back: behind an earlier command, just carried out.
        """
        held = self._queues[State.POST_CONTROL_DEFERRED]
        if control.adapter is None:
            used = len(self._queues) + self._queues.num_lingering > len(held)
        else:
            used = self._queues.users_of(control.adapter) > 0
        return used or any(
            request.controls_before < control.number and control.concerns(request)
            for request in held
        )

    def _apply(self, control: Control) -> None:
        if not control.done.set_running_or_notify_cancel():
            return
        try:
            control.apply(self._executor, self._adapters)
        except BaseException as error:
            control.done.set_exception(error)
            if not isinstance(error, Exception):
                raise
            logger.warning("a control command failed: %s", error)
        else:
            control.done.set_result(None)


def _same_concern(one: Control, other: Control) -> bool:
    return one.adapter is None or other.adapter in (None, one.adapter)


def load_adapter(name: str, adapter: object, fingerprint: str, done: Future[None]) -> Control:
    """The command that makes an adapter known, in place of one of the same name."""

    def apply(executor: ModelExecutor, adapters: dict[str, str]) -> None:
        executor.load_adapter(name, adapter)
        adapters[name] = fingerprint

    return Control(apply, done, adapter=name)


def unload_adapter(name: str, done: Future[None]) -> Control:
    """The command that forgets an adapter once its last request has ended.

    Its future raises `KeyError` when there is no such adapter.
    """

    def apply(executor: ModelExecutor, adapters: dict[str, str]) -> None:
        del adapters[name]
        executor.unload_adapter(name)

    return Control(apply, done, adapter=name)
