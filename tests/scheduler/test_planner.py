"""Queues in, rows out: the planner as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.scheduler.effects import begin_decoding
from qwen3_asgi.scheduler.plan import Row, Sampling, StepPlan
from qwen3_asgi.scheduler.planner import decoding, prefill_rows
from qwen3_asgi.scheduler.request import Request
from qwen3_asgi.scheduler.steps import Step

if TYPE_CHECKING:
    from collections.abc import Iterable

# (id, length, computed) -> and rows as (id, kind, start, number of tokens, samples)
Given = tuple[str, int, int]
Expected = tuple[str, str, int, int, bool]


def request(given: Given) -> Request:
    name, length, computed = given
    made = Request(name, list(range(100, 100 + length)))
    made.num_computed = computed
    made.blocks = list(range(-(-length // 4)))
    return made


def plan_step(
    step: int, active: Iterable[Request], prefilling: Iterable[Request], budget: int
) -> StepPlan:
    active = list(active)
    for one in active:
        begin_decoding(one)
        one.capacity = len(one.token_ids)
    return Step(step, decoding(active, []), prefill_rows(prefilling, budget)).plan


def shape(row: Row) -> Expected:
    return (row.request_id, row.kind, row.start, len(row.token_ids), row.sample is not None)


@pytest.mark.parametrize(
    ("active", "prefilling", "budget", "rows"),
    [
        pytest.param([("a", 5, 4)], [], 8, [("a", "decode", 4, 1, True)], id="decode"),
        pytest.param([], [("p", 5, 0)], 8, [("p", "prefill", 0, 5, True)], id="whole prompt"),
        pytest.param([], [("p", 8, 0)], 8, [("p", "prefill", 0, 8, True)], id="budget just fits"),
        pytest.param([], [("p", 9, 0)], 8, [("p", "prefill", 0, 8, False)], id="first chunk"),
        pytest.param([], [("p", 9, 8)], 8, [("p", "prefill", 8, 1, True)], id="last chunk"),
        pytest.param(
            [("a", 5, 4), ("b", 9, 8)],
            [("p", 3, 0)],
            8,
            [
                ("a", "decode", 4, 1, True),
                ("b", "decode", 8, 1, True),
                ("p", "prefill", 0, 3, True),
            ],
            id="decode rows first",
        ),
        pytest.param(
            [],
            [("p", 6, 0), ("q", 6, 0), ("r", 6, 0)],
            8,
            [("p", "prefill", 0, 6, True), ("q", "prefill", 0, 2, False)],
            id="budget is spent in order",
        ),
        pytest.param(
            [("a", 5, 4)],
            [("p", 20, 4)],
            1,
            [("a", "decode", 4, 1, True), ("p", "prefill", 4, 1, False)],
            id="decode rows take nothing from the budget",
        ),
    ],
)
def test_rows_of_a_step(
    active: list[Given], prefilling: list[Given], budget: int, rows: list[Expected]
) -> None:
    plan = plan_step(7, map(request, active), map(request, prefilling), budget)
    assert plan.step == 7
    assert [shape(row) for row in plan.rows] == rows


def test_who_has_no_slot_for_the_next_token_skips_the_step() -> None:
    ready, short = request(("a", 5, 4)), request(("b", 5, 4))
    ready.capacity, short.capacity = 5, 4
    assert decoding([ready, short], [short]) == [ready]


def test_a_fork_that_rides_on_a_prefill_has_no_row_of_its_own() -> None:
    parent, fork = request(("p", 5, 0)), request(("f", 5, 0))
    fork.riding = True
    assert [row.request_id for _, row in prefill_rows([parent, fork], 64)] == ["p"]


def test_row_carries_its_tokens_and_its_block_table() -> None:
    made = request(("p", 10, 4))
    plan = plan_step(1, [], [made], 3)
    (row,) = plan.rows
    assert list(row.token_ids) == [104, 105, 106]
    assert list(row.block_table) == made.blocks


def test_planning_changes_nothing() -> None:
    made = request(("p", 10, 4))
    before = {name: getattr(made, name) for name in Request.__slots__}
    plan_step(1, [], [made], 3)
    assert {name: getattr(made, name) for name in Request.__slots__} == before


@pytest.mark.parametrize(
    ("outputs", "min_tokens", "banned"),
    [(0, 0, ()), (0, 1, (0, 9)), (1, 2, (0, 9)), (2, 2, ())],
)
def test_stop_tokens_are_banned_until_min_tokens(
    outputs: int, min_tokens: int, banned: tuple[int, ...]
) -> None:
    made = Request(
        "r", [5, 6], min_tokens=min_tokens, eos_token_ids=[0], stop_token_ids=[9, 0], max_tokens=8
    )
    made.token_ids += [7] * outputs
    made.num_computed = len(made.token_ids) - 1
    plan = plan_step(1, [made], [], 8)
    spec = plan.rows[0].sample
    assert spec is not None
    assert (spec.sampling, spec.position, spec.banned_token_ids) == (Sampling(), outputs, banned)


@pytest.mark.parametrize(
    ("active", "prefilling", "kind", "num_tokens", "num_prefill_tokens"),
    [
        ([("a", 5, 4)], [], "decode", 1, 0),
        ([], [("p", 5, 0)], "prefill", 5, 5),
        ([("a", 5, 4)], [("p", 5, 0)], "mixed", 6, 5),
    ],
)
def test_plan_knows_its_kind_and_size(
    active: list[Given],
    prefilling: list[Given],
    kind: str,
    num_tokens: int,
    num_prefill_tokens: int,
) -> None:
    plan = plan_step(1, map(request, active), map(request, prefilling), 8)
    assert isinstance(plan, StepPlan)
    assert (plan.kind, plan.num_tokens, plan.num_prefill_tokens) == (
        kind,
        num_tokens,
        num_prefill_tokens,
    )
