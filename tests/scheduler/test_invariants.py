"""The invariants I1 to I7 over random lives."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.scheduler.machine import SchedulerMachine

NUM_LIVES = 5000


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("quiet")
def test_invariants_hold_in_every_life() -> None:
    lives: list[None] = []

    class Machine(SchedulerMachine):
        def __init__(self) -> None:
            super().__init__()
            lives.append(None)

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=NUM_LIVES,
            stateful_step_count=30,
            deadline=None,
            print_blob=True,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )
    assert len(lives) >= NUM_LIVES
