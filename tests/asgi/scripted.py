"""An engine that plays a script, and a client that talks raw ASGI to the app around it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import httpx

from qwen3_asgi.app import create_app
from qwen3_asgi.errors import EngineDead, EngineNotReady, InvalidRequest
from qwen3_asgi.scheduler.load import LoadSnapshot
from tests.openai.batches import batches
from tests.text.toy import toy_tokenizer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from prometheus_client import CollectorRegistry

    from qwen3_asgi.engine.adapters import AdapterInfo
    from qwen3_asgi.engine.handle import TokenBatch
    from qwen3_asgi.text.tokenizer import Tokenizer

T = TypeVar("T")
# What a script may hold: a batch, an error to raise, seconds to wait, or something to await.
Step = Any


class ScriptedHandle:
    """Plays its script once; remembers that it was cancelled."""

    def __init__(self, prompt_token_ids: list[int], script: Sequence[Step]) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.cancelled = False
        self._script = list(script)

    async def __aiter__(self) -> AsyncIterator[TokenBatch]:
        for step in self._script:
            if isinstance(step, (int, float)):
                await anyio.sleep(step)
            elif isinstance(step, Exception):
                raise step
            elif callable(step):
                await step()
            else:
                await anyio.lowlevel.checkpoint()
                yield step

    def cancel(self) -> None:
        self.cancelled = True


@dataclass
class ScriptedEngine:
    """The n-th submission plays the n-th script (the last one again when they run out).

    A script that is an error is what `submit` raises.
    """

    scripts: list[Sequence[Step] | Exception] = field(default_factory=lambda: [batches("hello")])
    model_name: str = "toy"
    state: str = "ready"
    tokenizer: Tokenizer = field(default_factory=toy_tokenizer)
    submitted: list[dict[str, Any]] = field(default_factory=list)
    handles: list[ScriptedHandle] = field(default_factory=list)
    registries: list[CollectorRegistry | None] = field(default_factory=list)
    offloaded: list[str] = field(default_factory=list)
    starts_asked: int = 0
    stalled_seconds: float | None = None
    loaded_adapters: list[AdapterInfo] = field(default_factory=list)

    async def offload(self, fn: Callable[..., T], /, *args: Any) -> T:
        self.offloaded.append(fn.__name__)
        return await anyio.to_thread.run_sync(fn, *args)

    async def submit(self, **asked: Any) -> ScriptedHandle:
        script = self.scripts[min(len(self.submitted), len(self.scripts) - 1)]
        self.submitted.append(asked)
        if isinstance(script, Exception):
            raise script
        if asked.get("messages") is not None:
            ids = self.tokenizer.encode_chat(
                asked["messages"], tools=asked["tools"], enable_thinking=asked["enable_thinking"]
            )
        elif asked.get("prompt") is not None:
            ids = self.tokenizer.encode(asked["prompt"])
        else:
            ids = asked["prompt_token_ids"]
        if not ids:
            raise InvalidRequest("the prompt must have at least one token", param="prompt")
        handle = ScriptedHandle(ids, script)
        self.handles.append(handle)
        return handle

    def adapters(self) -> list[AdapterInfo]:
        return self.loaded_adapters

    async def load_adapter(self, *asked: Any, **options: Any) -> AdapterInfo:
        raise NotImplementedError

    async def unload_adapter(self, name: str) -> None:
        raise NotImplementedError

    def start_soon(self) -> None:
        self.starts_asked += 1

    def refusal(self) -> EngineDead | EngineNotReady | None:
        if self.state == "ready":
            return None
        return EngineDead("dead") if self.state == "dead" else EngineNotReady(self.state)

    def load(self) -> LoadSnapshot:
        return LoadSnapshot(num_running=2, kv_used_blocks=1, kv_total_blocks=4)

    def metrics(self, registry: CollectorRegistry | None = None) -> None:
        self.registries.append(registry)


def client(engine: ScriptedEngine, **options: Any) -> httpx.AsyncClient:
    app = create_app(engine, **options)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://test")


async def call(
    app: Any, path: str, payload: Any = None, *, body: list[bytes] | None = None
) -> list[dict[str, Any]]:
    """Return the ASGI messages that the app sends, one by one as a server would see them."""
    parts = [json.dumps(payload).encode()] if body is None else list(body)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if parts:
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}
        await anyio.sleep_forever()
        raise AssertionError

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"test"), (b"content-type", b"application/json")],
        "server": ("test", 80),
        "client": ("test", 1),
    }
    await app(scope, receive, send)
    return sent


def events(text: str) -> list[Any]:
    """The payloads of a stream of events, `"[DONE]"` included, comments left out."""
    frames = [frame for frame in text.split("\n\n") if frame.startswith("data: ")]
    payloads = [frame.removeprefix("data: ") for frame in frames]
    return [payload if payload == "[DONE]" else json.loads(payload) for payload in payloads]
