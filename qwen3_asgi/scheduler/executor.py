"""The seam between the scheduler and whatever runs the model: the `ModelExecutor` protocol.

`model.executor.TorchExecutor` implements it on CPU and CUDA, `testing.FakeExecutor` in tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from qwen3_asgi.scheduler.plan import RequestId, StepPlan, StepResult


class ModelExecutor(Protocol):
    """Runs steps. Every method is called on the scheduler thread only.

    The scheduler owns the block tables (plain ints, `scheduler.blocks`); the executor owns the
    tensors behind them and whatever state it keeps per request.
    """

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        ...

    @property
    def num_kv_blocks(self) -> int:
        """KV blocks in the pool; block ids are `0 … num_kv_blocks-1`."""
        ...

    @property
    def max_context_tokens(self) -> int:
        """Longest sequence (prompt plus output) the model can hold."""
        ...

    def step(self, plan: StepPlan) -> StepResult:
        """Forward every row and sample where asked. Blocks until the result is known.

        Raises:
            Exception: anything raised fails the requests of this plan, and only these.
        """
        ...

    def drop_request(self, request_id: RequestId) -> None:
        """Forget a request that has ended: whatever is kept for it by id.

        Called exactly once for each request that was admitted at least once. It must not wait for
        the device. The request's KV blocks are taken back by the scheduler in the same breath, so a
        copy that still writes to them must be fenced here before this returns control of them.
        """
        ...

    def close(self) -> None:
        """Release the device memory. No other call follows."""
        ...
