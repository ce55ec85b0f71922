"""For executors: what a decode step samples, for the step that was launched behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from qwen3_asgi.scheduler.plan import PENDING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from qwen3_asgi.scheduler.plan import RequestId, Row, SampledToken, StepPlan, StepResult


class PendingTokens:
    """Used by the thread that runs decode steps."""

    def __init__(self) -> None:
        self._step = -1
        self._tokens: Mapping[RequestId, SampledToken] = {}

    def settle(self, plan: StepPlan) -> tuple[Sequence[Row], Mapping[RequestId, str]]:
        """The rows to run, with every token written into them, and the errors of those that can't.

        Called when the step begins; rows that were dropped are in neither. Only a step that was
        launched behind another has either kind.
        """
        if plan.behind is None:
            return plan.rows, {}
        known = self._tokens if self._step == plan.behind else {}
        ready: list[Row] = []
        errors: dict[RequestId, str] = {}
        for row in plan.rows:
            if row.dropped:
                continue
            if row.token_ids[0] == PENDING:
                token = known.get(row.request_id)
                if token is None:
                    errors[row.request_id] = "the step before gave it no token"
                    continue
                row.token_ids[0] = token.token_id
            ready.append(row)
        return ready, errors

    def note(self, plan: StepPlan, result: StepResult) -> None:
        """Remember what a step has sampled; a step that fails notes nothing."""
        self._step, self._tokens = plan.step, result.tokens
