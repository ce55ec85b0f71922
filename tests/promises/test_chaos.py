"""C5: whatever goes wrong, every request ends once, who stays is answered right, nothing is left.

The short run of `qwen3-asgi bench chaos`; the long one is for a person with twenty minutes.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

import pytest

from qwen3_asgi.bench import chaos as bench_chaos
from qwen3_asgi.bench.chaos import LEAST_SAMPLES, slope_of
from qwen3_asgi.bench.chaos_clients import DOORS, Clients
from qwen3_asgi.cli import main
from qwen3_asgi.engine import engine
from qwen3_asgi.engine.delivery import Delivery
from qwen3_asgi.scheduler.loop import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from qwen3_asgi.scheduler.events import Event

SHORT = ["--minutes", "0.1", "--prompts", "3", "--clients", "24", "--fail-every", "40", "--json"]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures are injected by the dozen."""
    logging.disable()
    yield
    logging.disable(logging.NOTSET)


def chaos(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["bench", "chaos", *SHORT, *options])
    return status, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), id="fake"),
        pytest.param(("--overlap", "--pipelined"), id="fake, pipelined"),
        pytest.param(
            ("--model", "tiny", "--overlap", "--pipelined", "--prompts", "2"),
            id="tiny, pipelined",
            marks=[pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)],
        ),
    ],
)
def test_chaos_leaves_nothing_and_disturbs_no_survivor(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, report = chaos(capsys, *options)
    assert (report["violations"], report["left"]) == ([], [])
    assert (status, report["ok"]) == (0, True)
    assert sum(report["ends"].values()) == report["submitted"]
    assert report["failed_steps"] == report["steps"] // 40 > 0
    outcomes = report["outcomes"]
    assert all(outcomes[door] for door in DOORS)
    for outcome in ("right", "left", "failed"):
        assert sum(each.get(outcome, 0) for each in outcomes.values()) > 0, outcome


# ---- the run is worth something: it finds what is planted ----


def test_chaos_finds_an_end_that_is_not_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those whose client has gone: nobody else would ever miss it."""
    send = Scheduler._send

    def forget(self: Scheduler, events: Sequence[Event]) -> None:
        send(self, [e for e in events if e.finish is None or e.finish.reason != "abort"])

    monkeypatch.setattr(Scheduler, "_send", forget)
    monkeypatch.setattr(bench_chaos, "SETTLE_SECONDS", 0.5)
    monkeypatch.setattr(engine, "DRAIN_SECONDS", 0.1)
    status, report = chaos(capsys)
    assert status == 1
    assert any(what.startswith("request ") for what in report["left"])
    assert any("live requests" in what for what in report["left"])


def test_chaos_finds_an_end_that_is_told_twice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    send = Scheduler._send
    monkeypatch.setattr(Scheduler, "_send", lambda self, events: send(self, [*events, events[-1]]))
    status, report = chaos(capsys)
    assert status == 1
    assert any("after its end" in what for what in report["violations"])


def test_chaos_finds_a_wrong_token(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and then a token is another one, but not in the run that says what is right."""
    deliver, start = Delivery.deliver, Clients.start
    running: list[Clients] = []

    def spoil(self: Delivery, events: Sequence[Event]) -> None:
        first = events[0]
        if running and first.token is not None:
            token = first.token._replace(token_id=(first.token.token_id + 1) % 500)
            events = [first._replace(token=token), *events[1:]]
        deliver(self, events)

    def begin(self: Clients) -> None:
        running.append(self)
        start(self)

    monkeypatch.setattr(Delivery, "deliver", spoil)
    monkeypatch.setattr(Clients, "start", begin)
    status, report = chaos(capsys)
    assert status == 1
    assert any("wrong answer" in what for what in report["violations"])


# ---- the trend of memory ----


def test_a_leak_is_a_slope_beyond_the_noise() -> None:
    noise = [((number * 7919) % 101) * 10.0 for number in range(600)]
    level = slope_of([300_000 + each for each in noise])
    leak = slope_of([300_000 + 20.0 * number + each for number, each in enumerate(noise)])
    assert level is not None
    assert not level.growing
    assert leak is not None
    assert leak.growing
    assert leak.kib_per_minute == pytest.approx(1200, rel=0.05)


def test_few_samples_say_nothing() -> None:
    assert slope_of([1.0] * (LEAST_SAMPLES - 1)) is None


@pytest.mark.parametrize("option", [["--clients", "3"], ["--fail-every", "1"], ["--prompts", "0"]])
def test_too_little_to_run_is_one_clear_line(
    option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "chaos", *option]) != 0
    assert "are needed" in capsys.readouterr().err
