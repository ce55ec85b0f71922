"""The kit works where torch and transformers cannot be imported."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "safetensors", "numpy"):
            raise ImportError(f"{name} is blocked here")

sys.meta_path.insert(0, Missing())
try:
    import torch
except ImportError:
    pass
else:
    raise SystemExit("torch was not blocked, this proves nothing")

import anyio, httpx
import qwen3_asgi.testing.fixtures
from qwen3_asgi import Engine, create_app
from qwen3_asgi.testing import (
    DisconnectingASGITransport, assert_idle_async, assert_no_leaks, fake_engine, use_fake_models
)

async def main():
    engine = fake_engine(replies={"hello": "world"})
    transport = DisconnectingASGITransport(create_app(engine))
    body = {"model": "fake", "prompt": "hello"}
    async with assert_no_leaks(engine), engine:
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = (await client.post("/v1/completions", json=body)).json()
            assert answer["choices"][0]["text"] == "world", answer
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}):
                pass
        await assert_idle_async(engine)

anyio.run(main)
anyio.run(main, backend="trio")
with use_fake_models({"hello": "there"}):
    assert Engine("Qwen/Qwen3-4B").generate_sync(prompt="hello").text == "there"
print("done")
"""


def test_a_fake_engine_needs_no_torch() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", CODE],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout == "done\n", done.stderr
