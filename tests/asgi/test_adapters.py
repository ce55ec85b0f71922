"""The adapter routes: off unless folders are named, and then only what is in them."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import httpx
import pytest
from openai.types import Model

from qwen3_asgi.app import create_app
from qwen3_asgi.engine.engine import Engine
from qwen3_asgi.errors import EngineDead, EngineNotReady, ModelLoadError
from tests.asgi.scripted import ScriptedEngine, events
from tests.engine.adapters import expected_with, write_adapter
from tests.engine.engines import executor, expected, running, settle, toy_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

pytestmark = pytest.mark.anyio

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PROMPT = list(range(2, 20))


@pytest.fixture
def allowed(tmp_path: Path) -> Path:
    folder = tmp_path / "allowed"
    write_adapter(folder / "one", "one")
    write_adapter(tmp_path / "outside", "outside")
    return folder


@asynccontextmanager
async def served(engine: Any, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    # On a thread, as most apps are made before a loop runs: a relative folder asks the system.
    app = await anyio.to_thread.run_sync(partial(create_app, engine, metrics=False, **options))
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        if isinstance(engine, Engine):
            async with running(engine):
                yield http
        else:
            yield http


def asked(model: str, **fields: Any) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": 6,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": None,
    } | fields


async def test_without_folders_nothing_is_loaded(allowed: Path) -> None:
    engine = toy_engine()
    async with served(engine) as http:
        await engine.load_adapter("mine", allowed / "one")
        for path, body in (
            (LOAD, {"lora_name": "b", "lora_path": str(allowed / "one")}),
            (UNLOAD, {"lora_name": "mine"}),
        ):
            response = await http.post(path, json=body)
            assert response.status_code == 403
            error = response.json()["error"]
            assert (error["type"], error["code"]) == (
                "invalid_request_error",
                "lora_loading_disabled",
            )
            assert "lora_folders" in error["message"]
        assert [info.name for info in engine.adapters()] == ["mine"]


async def test_an_adapter_from_its_loading_to_its_end(allowed: Path) -> None:
    fake = executor()
    engine = toy_engine(fake)
    async with served(engine, lora_folders=[allowed]) as http:
        assert len((await http.get("/v1/models")).json()["data"]) == 1
        response = await http.post(
            LOAD, json={"lora_name": "my/lora", "lora_path": str(allowed / "one")}
        )
        assert response.status_code == 200
        entry = response.json()
        assert Model.model_validate(entry).id == "my/lora"
        assert (entry["parent"], entry["root"]) == ("fake", "one")
        listed = (await http.get("/v1/models")).json()["data"]
        assert listed == [(await http.get("/v1/models/fake")).json(), entry]
        assert (await http.get("/v1/models/my/lora")).json() == entry
        assert str(allowed.parent) not in (await http.get("/v1/models")).text

        whole = (await http.post("/v1/completions", json=asked("my/lora"))).json()
        base = (await http.post("/v1/completions", json=asked("fake"))).json()
        said = engine.tokenizer.decode(expected_with(allowed / "one", PROMPT, 6))
        assert (whole["model"], whole["choices"][0]["text"]) == ("my/lora", said)
        assert base["choices"][0]["text"] == engine.tokenizer.decode(expected(PROMPT, 6)) != said
        streamed = await http.post("/v1/completions", json=asked("my/lora", stream=True))
        chunks = [event for event in events(streamed.text) if event != "[DONE]"]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == said
        assert {chunk["model"] for chunk in chunks} == {"my/lora"}
        chat = {
            "model": "my/lora",
            "messages": [{"role": "user", "content": "hi"}],
            "max_tokens": 4,
            "ignore_eos": True,
        }
        contents = [
            (await http.post("/v1/chat/completions", json=chat | {"model": name})).json()["choices"]
            for name in ("my/lora", "fake")
        ]
        assert contents[0] != contents[1]

        response = await http.post(UNLOAD, json={"lora_name": "my/lora"})
        assert response.json() == {"id": "my/lora", "object": "model", "deleted": True}
        assert fake.adapters == {}
        for missing in (
            await http.get("/v1/models/my/lora"),
            await http.post("/v1/completions", json=asked("my/lora")),
            await http.post("/v1/chat/completions", json=chat),
            await http.post(UNLOAD, json={"lora_name": "my/lora"}),
        ):
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "model_not_found"
        await settle(engine)


async def test_a_name_is_replaced_and_a_relative_path_is_below_a_folder(allowed: Path) -> None:
    engine = toy_engine()
    write_adapter(allowed / "deep" / "two", "two", rank=8)
    async with served(engine, lora_folders=str(allowed)) as http:
        for path in ("one", "deep/two"):
            body = {"lora_name": "mine", "lora_path": path, "load_inplace": True}
            assert (await http.post(LOAD, json=body)).status_code == 200
        [info] = engine.adapters()
        assert (info.path, info.rank) == ("deep/two", 8)
        said = (await http.post("/v1/completions", json=asked("mine"))).json()["choices"][0]["text"]
        truth = expected_with(allowed / "deep" / "two", PROMPT, 6)
        assert said == engine.tokenizer.decode(truth)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"lora_path": "{root}/outside"}, "lora_path", "invalid_adapter"),
        ({"lora_path": "{root}/allowed-not/one"}, "lora_path", "invalid_adapter"),
        ({"lora_path": "../outside"}, "lora_path", "invalid_adapter"),
        ({"lora_path": "{root}/allowed/../outside"}, "lora_path", "invalid_adapter"),
        ({"lora_path": "link"}, "lora_path", "invalid_adapter"),
        ({"lora_path": "{root}/allowed/link"}, "lora_path", "invalid_adapter"),
        ({"lora_path": "linked-file"}, "lora_path", "invalid_adapter"),
        ({"lora_path": "empty"}, "lora_path", "invalid_adapter"),
        ({"lora_path": "nothing"}, "lora_path", "invalid_adapter"),
        ({"lora_path": ""}, "lora_path", "invalid_adapter"),
        ({"lora_path": "one\0"}, "lora_path", "invalid_adapter"),
        ({"lora_path": None}, "lora_path", "invalid_type"),
        ({"lora_name": "fake"}, "lora_name", "invalid_value"),
        ({"lora_name": ""}, "lora_name", "invalid_value"),
        ({"lora_name": "x" * 129}, "lora_name", "invalid_value"),
        ({"lora_name": 3}, "lora_name", "invalid_type"),
        ({"load_inplace": False}, "load_inplace", "invalid_value"),
        ({"other": 1}, "other", "unknown_parameter"),
    ],
)
async def test_what_can_not_be_loaded_is_refused_by_name(
    allowed: Path, fields: dict[str, Any], param: str, code: str
) -> None:
    root = allowed.parent
    (allowed / "link").symlink_to(root / "outside")
    (allowed / "linked-file").mkdir()
    (allowed / "linked-file" / "adapter_config.json").symlink_to(
        root / "outside" / "adapter_config.json"
    )
    (allowed / "empty").mkdir()
    path = fields.get("lora_path")
    if path:
        fields = fields | {"lora_path": path.format(root=root)}
    engine = toy_engine()
    async with served(engine, lora_folders=[allowed]) as http:
        body = {"lora_name": "mine", "lora_path": "one"} | fields
        response = await http.post(LOAD, json=body)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            param,
            code,
        )
        assert str(root) not in error["message"]
        assert engine.adapters() == ()
        # What was wrong is what was changed.
        good = {"lora_name": "mine", "lora_path": "one"}
        assert (await http.post(LOAD, json=good)).status_code == 200


async def test_a_body_is_read_up_to_a_limit(allowed: Path) -> None:
    async with served(toy_engine(), lora_folders=[allowed]) as http:
        for path in (LOAD, UNLOAD):
            assert (await http.post(path, content=b" " * 70_000)).status_code == 413
            response = await http.post(path, content=b"[]")
            assert response.json()["error"]["code"] == "invalid_json"
            assert (await http.get(path)).status_code == 405


async def test_the_routes_want_the_key(allowed: Path) -> None:
    engine = toy_engine()
    async with served(engine, lora_folders=[allowed], api_key="secret") as http:
        for path in (LOAD, UNLOAD):
            body = {"lora_name": "mine", "lora_path": "one"}
            assert (await http.post(path, json=body)).status_code == 401
        assert engine.adapters() == ()
        headers = {"authorization": "Bearer secret"}
        assert (await http.post(LOAD, json=body, headers=headers)).status_code == 200


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (EngineNotReady("stopping"), 503, "engine_not_ready"),
        (EngineDead("dead"), 503, "engine_dead"),
        (ModelLoadError("no memory"), 500, "internal_error"),
    ],
)
async def test_an_engine_that_can_not_says_so(
    allowed: Path, error: Exception, status: int, code: str
) -> None:
    class Refusing(ScriptedEngine):
        async def load_adapter(self, *asked: Any, **options: Any) -> Any:
            raise error

        async def unload_adapter(self, name: str) -> None:
            raise error

    async with served(Refusing(), lora_folders=[allowed]) as http:
        for path, body in (
            (LOAD, {"lora_name": "mine", "lora_path": "one"}),
            (UNLOAD, {"lora_name": "mine"}),
        ):
            response = await http.post(path, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_folders_are_those_of_when_the_app_was_made(
    allowed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(allowed.parent)
    engine = toy_engine()
    async with served(engine, lora_folders=["allowed"]) as http:
        (allowed / "elsewhere").mkdir()
        monkeypatch.chdir(allowed / "elsewhere")
        body = {"lora_name": "mine", "lora_path": "one"}
        assert (await http.post(LOAD, json=body)).status_code == 200


@pytest.mark.parametrize("folders", ["", [""], ["/models", ""]])
def test_an_empty_folder_is_a_mistake(folders: Any) -> None:
    with pytest.raises(ValueError, match="lora_folders"):
        create_app(ScriptedEngine(), metrics=False, lora_folders=folders)
