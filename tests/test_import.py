"""`import qwen3_asgi` does nothing but define names; each check runs in a fresh interpreter."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import qwen3_asgi

HEAVY = ["torch", "transformers", "starlette", "prometheus_client", "numpy", "pydantic"]

OBSERVE = """
import json, logging, os, random, signal, sys, threading, warnings

def world():
    names = list(logging.root.manager.loggerDict)
    loggers = [logging.root, *(logging.getLogger(name) for name in names)]
    return {
        "environment": dict(os.environ),
        "signals": {str(s): repr(signal.getsignal(s)) for s in signal.valid_signals()},
        "handlers": [repr(h) for logger in loggers for h in logger.handlers
                     if not isinstance(h, logging.NullHandler)],
        "random": repr(random.getstate()),
        "threads": [thread.name for thread in threading.enumerate()],
        "excepthooks": [repr(sys.excepthook), repr(threading.excepthook)],
        "filters": repr(warnings.filters),
        "directory": os.getcwd(),
        "path": sys.path,
    }
"""


def run(code: str) -> object:
    """Run code that prints one JSON value in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_import_loads_nothing_heavy() -> None:
    loaded = run("import qwen3_asgi, sys, json; print(json.dumps(list(sys.modules)))")
    assert isinstance(loaded, list)
    assert [name for name in HEAVY if name in loaded] == []


@pytest.mark.parametrize(
    "name", ["EngineConfig", "SamplingParams", "LoadSnapshot", "EngineOverloaded"]
)
def test_values_and_errors_load_nothing_heavy(name: str) -> None:
    loaded = run(
        f"from qwen3_asgi import {name}; import sys, json; print(json.dumps(list(sys.modules)))"
    )
    assert isinstance(loaded, list)
    assert [heavy for heavy in HEAVY if heavy in loaded] == []


def test_engine_is_built_without_torch_and_without_a_thread() -> None:
    """Construction has no side effects; start does."""
    code = f"""{OBSERVE}
before = world()
from qwen3_asgi import Engine
engine = Engine("tiny")
print(json.dumps(["torch" in sys.modules, world()["threads"] == before["threads"]]))
"""
    assert run(code) == [False, True]


def test_import_changes_nothing_in_the_process() -> None:
    code = f"""{OBSERVE}
before = world()
import qwen3_asgi
after = world()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""
    assert run(code) == []


def test_public_names_change_nothing_in_the_process() -> None:
    """Loading every public name (torch aside, which nobody asked for) leaves the process alone."""
    code = f"""{OBSERVE}
import prometheus_client, pydantic, starlette.applications, anyio
before = world()
import qwen3_asgi
for name in qwen3_asgi.__all__:
    getattr(qwen3_asgi, name)
after = world()
print(json.dumps([name for name in before if before[name] != after[name]]))
"""
    assert run(code) == []


def test_import_leaves_the_random_state_of_numpy_alone() -> None:
    pytest.importorskip("numpy")
    code = """
import json, numpy
before = repr(numpy.random.get_state())
import qwen3_asgi
for name in qwen3_asgi.__all__:
    getattr(qwen3_asgi, name)
print(json.dumps(before == repr(numpy.random.get_state())))
"""
    assert run(code) is True


def test_import_registers_no_metric() -> None:
    code = """
import json, prometheus_client
def names():
    return sorted(family.name for family in prometheus_client.REGISTRY.collect())
before = names()
import qwen3_asgi
for name in qwen3_asgi.__all__:
    getattr(qwen3_asgi, name)
print(json.dumps(before == names()))
"""
    assert run(code) is True


def test_all_is_what_can_be_imported() -> None:
    assert list(qwen3_asgi.__all__) == sorted(qwen3_asgi.__all__, key=str)
    assert set(qwen3_asgi.__all__) == {*qwen3_asgi._HOME, "__version__"}
    assert set(qwen3_asgi.__all__) <= set(dir(qwen3_asgi))


@pytest.mark.parametrize("name", qwen3_asgi.__all__)
def test_public_name_resolves(name: str) -> None:
    value = getattr(qwen3_asgi, name)
    if name != "__version__":
        assert value.__name__ == name
        assert value.__doc__


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'LLM'"):
        _ = qwen3_asgi.LLM
