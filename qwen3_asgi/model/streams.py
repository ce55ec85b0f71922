"""On CUDA each thread that runs steps has a stream, so that a prefill runs beside decode steps."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    def own(self) -> Iterator[None]:
        """Run what follows on this thread's stream, and wait for it.

        The wait is for the others' sake: when a step has returned, its KV blocks may be given to a
        request whose steps run on another stream.
        """
        if self._device.type != "cuda":
            yield
            return
        stream = getattr(self._local, "stream", None)
        if stream is None:
            stream = self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            try:
                yield
            finally:
                stream.synchronize()
