"""README.md and docs/ tell the truth: code runs, paths exist, tables are right."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from prometheus_client import CollectorRegistry
from starlette.routing import Route

import qwen3_asgi
from qwen3_asgi import create_app
from qwen3_asgi.asgi.errors import error_reply
from qwen3_asgi.cli import main
from qwen3_asgi.metrics.catalogue import CATALOGUE
from qwen3_asgi.testing import DisconnectingASGITransport, assert_idle, fake_engine

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")
_LINK = re.compile(r"\]\(([^)#]*)(?:#[^)]*)?\)")
_PATH = re.compile(r"(?:[\w.-]+/)+[\w.-]*")
_TOP = ("qwen3_asgi/", "tests/", "docs/", "examples/", ".ci/")
_METRIC = re.compile(r"\b(?:vllm:|qwen3_asgi_)\w+")


class Block(NamedTuple):
    page: Path
    line: int
    info: str
    code: str


def blocks() -> Iterator[Block]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 2
            yield Block(page, line, match[1].strip(), match[2])


def of_kind(info: str) -> list[object]:
    return [
        pytest.param(block, id=f"{block.page.name}:{block.line}")
        for block in blocks()
        if block.info == info
    ]


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Two spin for each other when the machine has something else to do."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(block: Block) -> dict[str, object]:
    # Padded, so that a traceback has the page's line numbers.
    lines = "\n" * (block.line - 1) + block.code
    code = compile(lines, str(block.page), "exec", dont_inherit=True)
    # A module that exists: Litestar looks into that of a handler.
    namespace: dict[str, object] = {"__name__": __name__}
    exec(code, namespace)
    return namespace


@pytest.mark.parametrize("block", of_kind("python"))
def test_a_python_block_runs(block: Block) -> None:
    run(block)


@pytest.mark.parametrize("block", of_kind("python fragment"))
def test_a_fragment_compiles_and_its_imports_exist(block: Block) -> None:
    for node in ast.walk(ast.parse(block.code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom):
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"


def test_blocks_say_what_they_are() -> None:
    known = {"python", "python fragment", "bash", "promql", "json", ""}
    assert {block.info for block in blocks()} <= known


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_app_at_the_top_of_the_readme_answers() -> None:
    import httpx

    first = next(block for block in blocks() if block.info == "python")
    assert first.page.name == "README.md"
    namespace = run(first)
    app, engine = namespace["app"], namespace["engine"]
    assert callable(app)
    assert isinstance(engine, qwen3_asgi.Engine)
    transport = DisconnectingASGITransport(app)
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = await client.get("/ask", params={"question": "What is the capital of France?"})
        assert answer.status_code == 200
        assert isinstance(answer.json(), str)
        assert (await client.get("/llm/ready")).status_code == 200
        assert "vllm:num_requests_running" in (await client.get("/llm/metrics")).text
        assert_idle(engine)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_that_is_mentioned_exists(page: Path) -> None:
    text = _BLOCK.sub("", page.read_text(encoding="utf-8"))
    for target in _LINK.findall(text):
        if target and "://" not in target:
            assert (page.parent / target).exists(), target
    for code in _CODE.findall(text):
        if _PATH.fullmatch(code) and code.startswith(_TOP):
            assert (ROOT / code).exists(), code


def table(page: Path, first_column: str) -> list[list[str]]:
    """The cells of the rows of the table whose first column has this title."""
    lines = page.read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows: list[list[str]] = []
    for line in lines[begin + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip().strip("`") for cell in line.strip("|").split("|")])
    return rows


def test_the_endpoints_of_the_readme_are_those_of_the_app() -> None:
    app = create_app(fake_engine(), registry=CollectorRegistry())
    routes = {
        ("POST" if "POST" in (route.methods or ()) else "GET", re.sub(r":\w+}", "}", route.path))
        for route in app.routes
        if isinstance(route, Route)
    }
    told = {(method, path) for method, path, _ in table(ROOT / "README.md", "method")}
    assert told == routes


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_all_but_two_endpoints_want_the_key() -> None:
    import httpx

    app = create_app(fake_engine(), registry=CollectorRegistry(), api_key="key")
    transport = DisconnectingASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for method, path, _ in table(ROOT / "README.md", "method"):
            status = (await client.request(method, path)).status_code
            assert (status == 401) == (path not in ("/health", "/ready")), (path, status)


def test_the_errors_of_the_readme_have_these_statuses() -> None:
    told = table(ROOT / "README.md", "exception")
    for name, status, code, _ in told:
        error = getattr(qwen3_asgi, name)("a message")
        if name == "ClientDisconnected":
            assert status == "none"
            continue
        reply = error_reply(error)
        assert str(reply.status) == status, name
        assert reply.body["error"]["code"] == code.split("`")[0], name
    public = {
        name
        for name in qwen3_asgi.__all__
        if isinstance(value := getattr(qwen3_asgi, name), type) and issubclass(value, Exception)
    }
    assert {row[0] for row in told} == public - {"Qwen3Error"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_metrics_that_are_named_exist(page: Path) -> None:
    known = {family.name for family in CATALOGUE}
    named = set(_METRIC.findall(_BLOCK.sub("", page.read_text(encoding="utf-8"))))
    unknown = {name for name in named - known if not name.endswith("_bucket")}
    assert not unknown


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_the_answers_in_the_readme_are_the_bundled_models() -> None:
    import httpx

    readme = [block for block in blocks() if block.page.name == "README.md"]
    curl = shlex.split(next(block.code for block in readme if block.code.startswith("curl ")))
    path = "/v1" + curl[1].partition("/v1")[2]
    request = json.loads(curl[curl.index("-d") + 1])
    shown = json.loads(next(block.code for block in readme if block.info == "json"))

    engine = qwen3_asgi.Engine("tiny")
    transport = DisconnectingASGITransport(create_app(engine, registry=CollectorRegistry()))
    async with engine, httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        answer = (await client.post(path, json=request)).json()
        assert answer.keys() == shown.keys()
        for key in ("object", "model", "choices", "usage"):
            assert answer[key] == shown[key], key
        answers = {}
        for question, _ in table(ROOT / "README.md", "you"):
            request["messages"] = [{"role": "user", "content": question}]
            message = (await client.post(path, json=request)).json()["choices"][0]["message"]
            answers[question] = message["content"]
    assert answers == dict(table(ROOT / "README.md", "you"))


def test_the_commands_in_the_docs_are_commands(capsys: pytest.CaptureFixture[str]) -> None:
    shell = [block.code for block in blocks() if block.info == "bash"]
    lines = [line for code in shell for line in code.replace("\\\n", " ").splitlines()]
    texts = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    inline = re.findall(r"`(qwen3-asgi [^`]+)`", texts)
    ours = [line for line in lines if line.startswith("qwen3-asgi ")] + inline
    assert len(ours) > 3
    for line in ours:
        # With --help the parser checks the command and its options, and nothing runs.
        with pytest.raises(SystemExit) as ended:
            main([*shlex.split(line)[1:], "--help"])
        assert ended.value.code == 0, line
    assert "usage: qwen3-asgi" in capsys.readouterr().out


def test_every_page_of_the_docs_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in navigation
        assert page.name == "index.md" or f"({page.name})" in index
