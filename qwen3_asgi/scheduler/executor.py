"""The seam between the scheduler and whatever runs the model: the `ModelExecutor` protocol.

`model.executor.TorchExecutor` implements it on CPU and CUDA, `testing.FakeExecutor` in tests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from qwen3_asgi.scheduler.blocks import CachedBlock
    from qwen3_asgi.scheduler.plan import RequestId, RunningStep, StepPlan, StepResult


class Place(NamedTuple):
    """Where a block's KV is: a device block, a slot of host memory, or a slot of the file."""

    level: str  # "device", "host" or "file"
    slot: int


class Copy(NamedTuple):
    """Copy one block's KV. `content` says what it is, for levels that must know it again later."""

    source: Place
    target: Place
    content: CachedBlock


class LandedCopies(NamedTuple):
    """The end of one `begin`. `failed` maps the index of a copy that failed to the reason."""

    ticket: int
    failed: Mapping[int, str]


class KVTiers(Protocol):
    """KV blocks outside of the device's pool. Called on the scheduler thread only.

    Copies run in the background. Those of one kind (off the device, onto it, to the file) run in
    the order in which they were begun, and one that writes a block or a slot runs after all that
    were begun before and read or write it. A step, or a copy within the pool, waits for those that
    read a device block and were begun before it; so the scheduler may give such a block away at
    once.
    """

    @property
    def host_slots(self) -> int: ...

    @property
    def file_slots(self) -> int: ...

    def restored(self) -> Mapping[int, CachedBlock]:
        """What the file held when it was opened: slot -> content."""
        ...

    def begin(self, copies: Sequence[Copy]) -> int:
        """Start copying; returns a ticket at once."""
        ...

    def landed(self) -> Sequence[LandedCopies]:
        """What has ended since the last call, without waiting."""
        ...

    def forget(self, slots: Sequence[int]) -> None:
        """These slots of the file hold nothing any more."""
        ...


class ModelExecutor(Protocol):
    """Runs steps. Called on the scheduler thread only, but for `step` with overlap.

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

    @property
    def tiers(self) -> KVTiers | None:
        """Where evicted blocks can go; None: they are gone."""
        ...

    def on_landed(self, wake: Callable[[], None]) -> None:
        """Remember whom to call, on any thread, when a copy has landed. It never blocks."""
        ...

    def step(self, plan: StepPlan) -> StepResult | RunningStep:
        """Forward every row and sample where asked.

        Returns the result when it is known, or at once a step that is still running: what follows
        on the same thread is queued behind it on the device.

        With overlap there are two calls at a time, on a thread for decode steps and on one for
        prefill steps; they never write the same blocks, nor does one read what the other writes.
        With pipelined decode, rows may have `PENDING` tokens, and may be `dropped`.

        Raises:
            Exception: anything raised fails the requests of this plan, and only these; `EngineDead`
                ends the engine.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy KV blocks within the pool, (source, target) each, before any later step."""
        ...

    def load_adapter(self, name: str, adapter: object) -> None:
        """Make a LoRA adapter known. Between steps; rows with that name may follow."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter that no live request uses."""
        ...

    def drop_request(self, request_id: RequestId) -> None:
        """Forget a request that has ended: whatever is kept for it by id.

        Called exactly once for each request that was admitted at least once, never while a step
        that carries it runs. It must not wait for the device. The request's KV blocks are taken
        back by the scheduler in the same breath.
        """
        ...

    def close(self) -> None:
        """Wait for copies, then release the device memory. No other call follows."""
        ...
