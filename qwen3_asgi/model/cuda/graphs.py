"""CUDA graphs: what a step launches is recorded once, and launched as a whole from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from qwen3_asgi.model.cuda.decode import Run


class GraphCapture:
    """Turns runs into graphs, one after the other, on the current device.

    Each call captures what the run launches; the replay returns the same tensor each time. The
    graphs have their memory from one pool: no two may be replayed at a time, and what one has left
    there is gone with the next.
    """

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Run) -> Run:
        """
        Raises:
            RuntimeError: it does something that cannot be captured, as reading from the device.
        """
        # Kernels compile and libraries allocate at first use, which no capture may contain.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # The outer one is for a capture that fails: it would leave its stream as the current one.
        # Not "global", which forbids the threads of the host application what only we must not do.
        with (
            torch.cuda.stream(torch.cuda.current_stream()),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            output = run()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay
