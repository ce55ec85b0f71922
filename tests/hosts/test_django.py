"""Django's own ways: it cancels async views of gone clients itself, and adapts sync and async."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread
import pytest
from django.core.asgi import get_asgi_application
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.urls import path

from qwen3_asgi import ClientDisconnected, create_app
from tests.engine.engines import settle
from tests.hosts.apps import django_host
from tests.hosts.apps.stage import params
from tests.hosts.scene import LEAVER, STAYS, Scene, said

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from starlette.types import ASGIApp

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.parametrize("anyio_backend", ["asyncio"]),  # Django knows no other
]

GONE = "tests.hosts.apps.django_gone.AnswerTheGone"
SYNC_ONLY = f"{__name__}.sync_only"


def sync_only(get_response: Callable[[HttpRequest], HttpResponse]) -> Any:
    """A middleware as there are many: below it Django runs an async view from a thread."""

    def middleware(request: HttpRequest) -> HttpResponse:
        return get_response(request)

    return middleware


def app_of(scene: Scene, views: dict[str, Any], *middleware: str) -> ASGIApp:
    django_host.configure([path(name, view) for name, view in views.items()], *middleware)
    llm = create_app(scene.engine, registry=scene.stage.registry)
    return django_host.beside(get_asgi_application(), llm)


def asked(request: HttpRequest) -> dict[str, Any]:
    fields = json.loads(request.body)
    return {"prompt": fields["prompt"], "params": params(fields)}


def views_of(scene: Scene) -> dict[str, Any]:
    """They do not catch `ClientDisconnected`."""
    engine = scene.engine

    async def generate(request: HttpRequest) -> JsonResponse:
        with scene.stage.noting():
            output = await engine.generate(**asked(request))
        return JsonResponse({"tokens": len(output.token_ids)})

    def in_thread(request: HttpRequest) -> JsonResponse:
        with scene.stage.noting():
            output = engine.generate_sync(**asked(request))
        return JsonResponse({"tokens": len(output.token_ids)})

    def stream_sync(request: HttpRequest) -> StreamingHttpResponse:
        handle = engine.submit_sync(**asked(request))

        def lines() -> Iterator[str]:
            with scene.stage.noting():
                for batch in handle.read_sync():
                    yield f"data: {len(batch.tokens)}\n"

        return StreamingHttpResponse(lines(), content_type="text/plain")

    return {"generate": generate, "sync": in_thread, "stream-sync": stream_sync}


@pytest.mark.parametrize("view", ["/generate", "/sync"])
@pytest.mark.parametrize("middleware", [(GONE,), (GONE, SYNC_ONLY), (SYNC_ONLY, GONE)])
async def test_one_middleware_answers_the_gone_for_all_views(
    scene: Scene, view: str, middleware: tuple[str, ...]
) -> None:
    await scene.leave(app_of(scene, views_of(scene), *middleware), view)
    assert scene.told().keys() <= {"ClientDisconnected", "CancelledError"}


@pytest.mark.parametrize(("middleware", "status"), [((GONE,), 499), ((), 500)])
async def test_what_django_makes_of_a_view_that_lets_it_through(
    scene: Scene, middleware: tuple[str, ...], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    """When its own cancellation does not come first, as it mostly does."""

    async def late(request: HttpRequest) -> HttpResponse:
        raise ClientDisconnected("the client has gone")

    async with scene.client(app_of(scene, {"late": late}, *middleware)) as http:
        assert (await http.post("/late", json=LEAVER)).status_code == status
    assert ("Internal Server Error: /late" in caplog.text) == (status == 500)


@pytest.mark.filterwarnings("ignore:StreamingHttpResponse must consume synchronous iterators")
async def test_a_stream_over_a_sync_iterator_is_collected_in_a_thread_and_dropped(
    scene: Scene,
) -> None:
    """Django reads all of it before it answers, so this client leaves before its answer."""
    await scene.leave(app_of(scene, views_of(scene), GONE), "/stream-sync")
    assert scene.told() == {"ClientDisconnected": 1}


async def test_a_view_without_a_generation_is_cancelled_by_django_as_ever(scene: Scene) -> None:
    notes: list[str] = []
    waiting = anyio.Event()

    async def slow(request: HttpRequest) -> HttpResponse:
        waiting.set()
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            notes.append("cancelled by Django")
            raise
        raise NotImplementedError

    async with scene.client(app_of(scene, {"slow": slow})) as http:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: http.post("/slow", json=LEAVER))
            await waiting.wait()
            group.cancel_scope.cancel()
        await scene.until(lambda: notes)
    assert notes == ["cancelled by Django"]
    assert scene.counted("qwen3_asgi_client_disconnects_total") == 0
    scene.nobody_complained()


async def test_a_view_that_waits_for_something_else_is_cancelled_by_django_too(
    scene: Scene,
) -> None:
    """Its generation ends with the disconnect, its wait by Django's cancellation."""
    notes: list[str] = []

    async def elsewhere(request: HttpRequest) -> HttpResponse:
        handle = await scene.engine.submit(**asked(request))
        try:
            await anyio.sleep_forever()
        except asyncio.CancelledError:
            notes.append("cancelled by Django")
            raise
        finally:
            with pytest.raises(ClientDisconnected):
                await anext(handle)
            notes.append("and the generation is gone")
        raise NotImplementedError

    steps = await hang_up(scene, app_of(scene, {"elsewhere": elsewhere}), "/elsewhere")
    await settle(scene.engine)
    assert notes == ["cancelled by Django", "and the generation is gone"]
    assert scene.stage.executor.plans == steps
    scene.nobody_complained()


async def hang_up(scene: Scene, app: ASGIApp, view: str) -> int:
    """Leave while the first step is held; returns the number of steps that had begun."""
    async with scene.client(app) as http:
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: http.post(view, json=LEAVER))
            await scene.gate.held(1)
            before = scene.counted("qwen3_asgi_client_disconnects_total")
            group.cancel_scope.cancel()
        await scene.disconnect_noticed(before)
        steps = scene.gate.arrived
        scene.gate.open()
    return steps


async def test_a_client_that_stays_is_answered_behind_any_middleware(scene: Scene) -> None:
    scene.gate.open()
    app = app_of(scene, views_of(scene), GONE, SYNC_ONLY)
    async with scene.client(app) as http:
        for view in ("/generate", "/sync"):
            assert said(await http.post(view, json=STAYS)) == STAYS["max_tokens"]
