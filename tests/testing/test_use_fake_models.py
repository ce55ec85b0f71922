"""A host's app keeps its `Engine("Qwen/Qwen3-4B")` and is tested without weights."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from qwen3_asgi import Engine, EngineConfig, ModelLoadError, SamplingParams
from qwen3_asgi.engine.process import replaced_loading
from qwen3_asgi.testing import StepGate, assert_idle, fake_engine, use_fake_models

if TYPE_CHECKING:
    from qwen3_asgi.engine.loading import LoadedModel

HOST = Engine("Qwen/Qwen3-4B")  # as at the top of a host's module
PARAMS = SamplingParams(max_tokens=3)


@pytest.fixture(autouse=True)
def real_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would load weights says so instead."""

    def load(name: str, config: EngineConfig) -> LoadedModel:
        raise ModelLoadError(f"{name} would be loaded")

    monkeypatch.setattr("qwen3_asgi.engine.engine.load_model", load)


before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def engines_of_other_tests() -> None:
    """What another test has left running is not this one's."""
    before.clear()
    before.update(threading.enumerate())


def threads() -> list[str]:
    ours = set(threading.enumerate()) - before
    return [thread.name for thread in ours if thread.name.startswith("qwen3-asgi")]


def test_engines_built_before_inside_and_shared_load_the_fake_model() -> None:
    shared = Engine.shared("Qwen/Qwen3-8B", EngineConfig(max_batch=3))
    with use_fake_models({"hello": "hi"}) as models:
        inside = Engine("Qwen/Qwen3-0.6B")
        for engine in (HOST, shared, inside):
            assert engine.generate_sync(prompt="hello").text == "hi"
            assert engine.model_name.startswith("Qwen/Qwen3-")
            assert_idle(engine)
        assert models.engines == [HOST, shared, inside]
        assert [executor.plans > 0 for executor in models.executors] == [True] * 3
    assert [engine.state for engine in models.engines] == ["new"] * 3
    assert threads() == []


@pytest.mark.parametrize("round", [1, 2])
def test_each_test_starts_the_hosts_engine_anew_on_first_use(round: int) -> None:
    """No lifespan runs here, as in Django: only the first use starts it."""
    with use_fake_models() as models:
        models.replies = lambda prompt: f"{round}"
        assert HOST.generate_sync(prompt="hello").text == f"{round}"
        assert len(models.engines) == 1


def test_without_replies_it_goes_on_until_it_is_told_to_stop() -> None:
    with use_fake_models():
        output = HOST.generate_sync(prompt="hello", params=SamplingParams(max_tokens=500))
        assert (len(output.token_ids), output.finish_reason) == (500, "length")


def test_outside_models_are_real_again() -> None:
    engine = Engine("Qwen/Qwen3-0.6B")
    with use_fake_models():
        engine.generate_sync(prompt="hello", params=PARAMS)
    with pytest.raises(ModelLoadError, match="would be loaded"):
        engine.generate_sync(prompt="hello")


def test_leaving_ends_what_still_runs_or_is_held() -> None:
    gate = StepGate(open=False)
    with use_fake_models(gate=gate) as models:
        handle = HOST.submit_sync(prompt="hello", params=SamplingParams(max_tokens=3000))
        gate.held_sync()
    assert threads() == []
    assert HOST.state == "new"
    assert models.engines == [HOST]
    del handle


def test_leaving_waits_for_an_engine_that_has_just_begun_to_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would come to the real loader otherwise, after the fake one was taken away."""
    leaving = threading.Event()

    class Gate(StepGate):
        def open(self) -> None:  # the first thing that is done on leaving
            super().open()
            leaving.set()

    def slow() -> object:
        leaving.wait(20)
        time.sleep(0.05)
        return replaced_loading()

    monkeypatch.setattr("qwen3_asgi.engine.engine.replaced_loading", slow)
    late = Engine("Qwen/Qwen3-0.6B")
    with use_fake_models(gate=Gate()) as models:
        late.start_soon()
    assert (late.state, threads()) == ("new", [])
    assert models.engines == [late]


def test_what_runs_already_is_left_alone_and_so_is_an_own_loader() -> None:
    with fake_engine() as own:
        with use_fake_models() as models:
            before = own.generate_sync(prompt="hello", params=PARAMS)
            with fake_engine() as inside:
                assert inside.generate_sync(prompt="hello", params=PARAMS).text == before.text
            assert models.engines == []
        assert own.state == "ready"


def test_a_failure_in_the_block_does_not_keep_the_fakes() -> None:
    def fail() -> None:
        HOST.start_sync()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), use_fake_models():
        fail()
    assert HOST.state == "new"
    with pytest.raises(ModelLoadError, match="would be loaded"):
        Engine("Qwen/Qwen3-0.6B").start_sync()
