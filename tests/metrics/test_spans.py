"""OpenTelemetry spans of requests: whose children they are, their phases, and how they end."""

from __future__ import annotations

import logging
import sys
import threading
from typing import TYPE_CHECKING

import pytest

from qwen3_asgi.config import EngineConfig
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.errors import GenerationTimeout
from qwen3_asgi.metrics import spans
from qwen3_asgi.metrics.spans import RequestSpans
from qwen3_asgi.scheduler.request import Request, State
from tests.engine.engines import LONG, Gate, executor, running, tokens, toy_engine
from tests.metrics.test_recorder import finish

pytest.importorskip("opentelemetry.sdk.trace")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import Tracer

    from qwen3_asgi.scheduler.events import Finish


class Exported:
    """A provider of its own, and what has come out of it."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer: Tracer = provider.get_tracer("tests")

    def spans(self) -> dict[str, ReadableSpan]:
        finished = self._exporter.get_finished_spans()
        assert len({span.name for span in finished}) == len(finished)
        return {span.name: span for span in finished}


@pytest.fixture
def exported() -> Exported:
    return Exported()


@pytest.fixture
def traced(exported: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines get this provider's tracer for the global one."""
    monkeypatch.setattr(trace, "get_tracer", lambda name: exported.tracer)


def seconds(span: ReadableSpan) -> float:
    assert span.start_time is not None
    assert span.end_time is not None
    return (span.end_time - span.start_time) / 1e9


def ended(exported: Exported, request: Request, end: Finish, swept: State | None = None) -> None:
    """One request's life, without an engine."""
    made = RequestSpans("tiny", exported.tracer)
    with exported.tracer.start_as_current_span("caller"):
        made.open([request])
    if swept is not None:
        made.on_cancel(request, swept, 0)
    made.on_finish(request, end)
    made.close()


def test_the_phases_are_those_of_the_scheduler(exported: Exported, request_of_ten: Request) -> None:
    request_of_ten.load_began_at, request_of_ten.load_ended_at = 100.1, 100.3
    request_of_ten.adapter = "french"
    ended(exported, request_of_ten, finish("stop"))
    found = exported.spans()
    whole = found["generate tiny"]
    lengths = {name: seconds(found[name]) for name in found if name != "caller"}
    assert lengths == pytest.approx(
        {"queue": 0.5, "load": 0.2, "prefill": 0.5, "decode": 0.2, "generate tiny": 1.2}, abs=1e-6
    )
    for name in ("queue", "load", "prefill", "decode"):
        assert found[name].parent == whole.context
    assert whole.parent == found["caller"].context
    assert whole.start_time == found["queue"].start_time
    assert whole.end_time == found["decode"].end_time
    assert whole.status.status_code is StatusCode.UNSET
    assert dict(whole.attributes or {}) == {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.response.finish_reasons": ("stop",),
        "qwen3_asgi.request_id": "r",
        "qwen3_asgi.cached_tokens": 4,
        "qwen3_asgi.num_preemptions": 0,
        "qwen3_asgi.adapter": "french",
    }


def test_a_cancelled_request_says_from_where_it_was_swept(exported: Exported) -> None:
    ended(exported, Request("r", range(10), arrival=0.0), finish("abort"), State.DEFERRED)
    found = exported.spans()
    assert set(found) == {"caller", "generate tiny", "queue"}
    whole = found["generate tiny"]
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "cancelled")
    attributes = dict(whole.attributes or {})
    assert (attributes["error.type"], attributes["qwen3_asgi.swept_from"]) == (
        "cancelled",
        "deferred",
    )
    assert whole.end_time == found["queue"].end_time


def test_an_error_is_the_status(exported: Exported, request_of_ten: Request) -> None:
    error = GenerationTimeout("too late")
    ended(exported, request_of_ten, finish("error")._replace(error=error))
    whole = exported.spans()["generate tiny"]
    assert (whole.status.status_code, whole.status.description) == (StatusCode.ERROR, "too late")
    assert dict(whole.attributes or {})["error.type"] == "GenerationTimeout"


def test_who_was_never_submitted_leaves_no_span(exported: Exported) -> None:
    made = RequestSpans("tiny", exported.tracer)
    request = Request("r", [1])
    made.open([request])
    made.forget([request])
    made.on_finish(request, finish("error"))
    made.close()
    assert exported.spans() == {}


def test_a_tracer_that_fails_is_logged_and_the_next_request_has_its_spans(
    exported: Exported, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = RequestSpans("tiny", exported.tracer)
    start_span = exported.tracer.start_span
    calls: list[object] = []

    def flaky(*args: object, **kwargs: object) -> object:
        calls.append(args)
        if len(calls) == 1:
            raise RuntimeError("the exporter is gone")
        return start_span(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(exported.tracer, "start_span", flaky)
    with caplog.at_level(logging.ERROR):
        for name in ("a", "b"):
            request = Request(name, [1])
            made.open([request])
            made.on_finish(request, finish("abort"))
        made.close()
    assert "making the spans of request a failed" in caplog.text
    assert dict(exported.spans()["generate tiny"].attributes or {})["qwen3_asgi.request_id"] == "b"


@pytest.mark.anyio
@pytest.mark.usefixtures("traced")
async def test_a_generation_is_a_child_of_its_callers_span(exported: Exported) -> None:
    async with running(toy_engine(config=EngineConfig(tracing=True))) as engine:
        with exported.tracer.start_as_current_span("endpoint"):
            await engine.generate(prompt_token_ids=[1, 2, 3], params=tokens(4))
    found = exported.spans()
    assert set(found) == {"endpoint", "generate fake", "queue", "prefill", "decode"}
    assert found["generate fake"].parent == found["endpoint"].context
    assert dict(found["generate fake"].attributes or {})["gen_ai.usage.output_tokens"] == 4


@pytest.mark.anyio
@pytest.mark.usefixtures("traced")
async def test_a_generation_that_was_left_has_its_span(exported: Exported) -> None:
    fake = executor()
    gate = Gate(fake)
    async with running(toy_engine(fake, EngineConfig(tracing=True)), gate) as engine:
        handle = await engine.submit(prompt_token_ids=[1, 2, 3], params=LONG)
        handle.cancel()
        gate.open()
    assert not [t.name for t in threading.enumerate() if t.name.endswith(" spans")]
    whole = exported.spans()["generate fake"]
    assert whole.status.description == "cancelled"
    assert whole.parent is None


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_without_tracing_nothing_is_loaded_or_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spans, "RequestSpans", None)
    monkeypatch.setattr("qwen3_asgi.engine.lifecycle.RequestSpans", None)
    async with running(toy_engine()) as engine:
        out = await engine.generate(prompt_token_ids=[1, 2, 3], params=tokens(4))
        assert len(out.token_ids) == 4


def test_without_opentelemetry_the_engine_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ImportError, match=r"pip install 'qwen3-asgi\[otel\]'"):
        Engine("tiny", EngineConfig(tracing=True))
    Engine("tiny")
