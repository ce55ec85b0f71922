"""Each example in a real server process: it answers, drops a gone client, and ends by Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.hosts.server import Server, read_until, serve, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

EXAMPLES = {
    "starlette": ("examples.starlette_app:app", ["/ask"]),
    "fastapi": ("examples.fastapi_app:app", ["/ask", "/ask-sync"]),
    "django": ("examples.django_app.asgi:app", ["/ask", "/ask-sync"]),
}
LONG = 3000


@pytest.fixture(scope="module", params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Iterator[tuple[Server, list[str]]]:
    app, asking = EXAMPLES[request.param]
    # One thread: two of them spin for each other when the machine has something else to do.
    with serve(app, env={"OMP_NUM_THREADS": "1"}) as server:
        yield server, asking
        server.stop_cleanly()


def test_the_example_answers(example: tuple[Server, list[str]]) -> None:
    server, asking = example
    question = "What is the capital of France?"
    for path in asking:
        answer = server.post(path, {"question": question})
        assert answer.status_code == 200, (path, answer.text)
        assert answer.json()["answer"].strip(), path
    story = server.get("/story?tokens=20")
    assert story.status_code == 200
    assert story.headers["content-type"] == "text/plain; charset=utf-8"
    assert story.text
    chat = {"model": "tiny", "messages": [{"role": "user", "content": question}], "max_tokens": 9}
    mounted = server.post("/llm/v1/chat/completions", chat)
    assert mounted.status_code == 200, mounted.text
    assert mounted.json()["usage"]["completion_tokens"] > 0
    assert server.get("/llm/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_client_that_leaves_frees_the_engine(example: tuple[Server, list[str]]) -> None:
    server, _ = example
    before = server.metric("vllm:request_success_total", finished_reason="abort")
    generated = server.metric("vllm:generation_tokens_total")
    completion = {"model": "tiny", "prompt": "x", "max_tokens": LONG, "ignore_eos": True}
    with (
        server.send("GET", f"/story?tokens={LONG}") as streaming,
        server.send("POST", "/llm/v1/completions", completion),
    ):
        read_until(streaming, b"\r\n\r\n")
        wait_until(lambda: server.load()["num_running"] == 2, "both requests are running")
        assert server.load()["kv_used_blocks"] > 0
    server.wait_idle()
    assert server.metric("vllm:request_success_total", finished_reason="abort") == before + 2
    assert server.metric("vllm:generation_tokens_total") - generated < LONG


def test_fastapi_has_the_engine_in_its_own_registry() -> None:
    import subprocess
    import sys

    code = (
        "import examples.fastapi_app as example, prometheus_client as p\n"
        "own = p.generate_latest(example.registry).decode()\n"
        "assert 'questions_total' in own and 'vllm:num_requests_running' in own, own\n"
        "assert 'vllm' not in p.generate_latest().decode()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
