"""The rotary table is shared by the threads that run steps at once."""

from __future__ import annotations

import threading

import torch

from qwen3_asgi.model.rope import FIRST_TABLE_POSITIONS, RotaryTable
from qwen3_asgi.model.rope_config import RopeConfig

GUARD_SECONDS = 20.0
NEAR, FAR = FIRST_TABLE_POSITIONS + 1, 4 * FIRST_TABLE_POSITIONS


class Growing(RotaryTable):
    """Its shorter growth is kept waiting until the longer one has been put in place."""

    def __init__(self) -> None:
        self.begun, self.finish = threading.Event(), threading.Event()
        super().__init__(RopeConfig(theta=1e6), 8, torch.device("cpu"))

    def _compute(self, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        table = super()._compute(num_positions)
        if FIRST_TABLE_POSITIONS < num_positions <= FAR:
            self.begun.set()
            assert self.finish.wait(GUARD_SECONDS)
        return table


def test_a_shorter_table_that_comes_late_spoils_no_lookup() -> None:
    table = Growing()
    near = threading.Thread(target=table.lookup, args=(torch.tensor([NEAR]), NEAR))
    near.start()
    assert table.begun.wait(GUARD_SECONDS)

    class Positions(torch.Tensor):
        """Used first for the cosines; before the sines the other thread's table comes."""

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = super().__torch_function__(func, types, args, kwargs or {})
            if func is torch.Tensor.index_select and not table.finish.is_set():
                table.finish.set()
                near.join(GUARD_SECONDS)
            return result

    positions = torch.tensor([NEAR, FAR]).as_subclass(Positions)
    cos, sin = table.lookup(positions, FAR)
    assert table.finish.is_set()
    assert not near.is_alive()
    right = RotaryTable(RopeConfig(theta=1e6), 8, torch.device("cpu"))
    right_cos, right_sin = right.lookup(torch.tensor([NEAR, FAR]), FAR)
    assert torch.equal(cos, right_cos)
    assert torch.equal(sin, right_sin)
