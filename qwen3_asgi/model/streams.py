"""On CUDA each thread that runs steps has a stream, so that a prefill runs beside decode steps."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


class Turn:
    """One thread's use of its stream. `waits` is cleared to leave what was launched running."""

    __slots__ = ("waits",)

    def __init__(self) -> None:
        self.waits = True


class ThreadStreams:
    """Does nothing on other devices.

    Args:
        device: where the streams are; what was queued there before is waited for once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._local = threading.local()
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the weights were written on the default stream

    @contextmanager
    def own(self) -> Iterator[Turn]:
        """Run what follows on this thread's stream, and wait for it unless told otherwise.

        The wait is for the others' sake: when a step has landed, its KV blocks may be given to a
        request whose steps run on another stream. A step that goes on running (`RunningStep`)
        lands later, when its last operation is through, so it needs no wait here. What raises is
        always waited for: nobody else would be.
        """
        turn = Turn()
        if self._device.type != "cuda":
            yield turn
            return
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            try:
                yield turn
            except BaseException:
                stream.synchronize()
                raise
            if turn.waits:
                stream.synchronize()
