"""An httpx transport that streams an ASGI app's answer as it is sent, and can hang up.

httpx's own `ASGITransport` collects the whole answer first and reports the disconnect only after
it, so a client that leaves in the middle can't be tested with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import httpx

from qwen3_asgi.testing.exchange import NEVER, Exchange, HangUpPoint
from qwen3_asgi.testing.lifespan import lifespan as run_lifespan

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator, Iterator
    from contextlib import AbstractAsyncContextManager
    from types import TracebackType

    from anyio.abc import TaskGroup
    from starlette.types import ASGIApp, Scope

HIGH_WATER_BYTES = 65536
BASE_URL = "http://localhost"


class HungUp(httpx.TransportError):
    """The client has hung up at the point that the test has set; there is no more to read."""


class DisconnectingASGITransport(httpx.AsyncBaseTransport):
    """`httpx.AsyncClient(transport=DisconnectingASGITransport(app))`, used as a context manager.

    Closing a response before its end (leaving `client.stream(...)`), or cancelling a request that
    waits for its response, is a client that hangs up: the app's `receive` yields `http.disconnect`
    at once, as it does under every real server, and the app is not cancelled. With `hang_up_at` and
    `hang_up_after` it hangs up by itself.

    Leaving the client hangs up what is still open and waits for every app call to end. What an app
    raises comes out of the request or of reading the body; if the client had hung up or has the
    whole response by then, of `ended` or of leaving the client. An app that breaks the rules of
    ASGI raises, too: no response, half of one, two of them, another length than promised.

    A request body that is an async iterator is passed on chunk by chunk, as the app reads it. An
    app that sends faster than the client reads waits in `send`.

    Args:
        app: what to send requests to.
        raise_app_exceptions: when False, the client sees of an app's exception what it would see of
            it behind a server: a response with status 500, or `httpx.RemoteProtocolError` in the
            middle of one.
        root_path: the scope's.
        spec_version: the scope's; the spec allows servers from 2.4 on to raise from `send`.
        raise_on_send: let `send` raise `OSError` after a disconnect, instead of swallowing.
        high_water_bytes: how much of a response may be unread before `send` waits.
        lifespan: run the app's lifespan around everything, and hand its state to the requests.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        raise_app_exceptions: bool = True,
        root_path: str = "",
        spec_version: str = "2.3",
        raise_on_send: bool = False,
        high_water_bytes: int = HIGH_WATER_BYTES,
        lifespan: bool = False,
    ) -> None:
        self.app = app
        self.raise_app_exceptions = raise_app_exceptions
        self.root_path = root_path
        self.spec_version = spec_version
        self.raise_on_send = raise_on_send
        self.high_water_bytes = high_water_bytes
        self.runs_lifespan = lifespan
        self._lifespan: AbstractAsyncContextManager[dict[str, Any]] | None = None
        self._state: dict[str, Any] = {}
        self._point = NEVER
        # Those begun since a point was set.
        self._round: list[Exchange] = []
        self._group: TaskGroup | None = None
        self._live: set[Exchange] = set()
        self._failed: list[Exchange] = []

    async def __aenter__(self) -> DisconnectingASGITransport:
        if self.runs_lifespan:
            self._lifespan = run_lifespan(self.app)
            self._state = await self._lifespan.__aenter__()
        self._group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        for exchange in self._live:
            exchange.hang_up()
        if error is not None:
            group.cancel_scope.cancel()
        try:
            # Not given the error, which would come back in an exception group.
            await group.__aexit__(None, None, None)
        finally:
            if self._lifespan is not None:
                await self._lifespan.__aexit__(None, None, None)
        if error is None:
            self._raise_failed()

    # ---- when to hang up ----

    def hang_up_at(self, *, call: int | None = None, turn: int | None = None) -> None:
        """Hang up by itself in every request from now on, which then raises `HungUp`.

        Args:
            call: at the app's call of `receive` or `send` with this number, counted from 1 over
                both. That call is the first to find the client gone.
            turn: so many turns of the event loop after the app was called, wherever it is then.
        """
        self._set(HangUpPoint(call=call, turn=turn))

    def hang_up_after(
        self,
        *,
        messages: int | None = None,
        bytes: int | None = None,
        uploaded: int | None = None,
    ) -> None:
        """As `hang_up_at`, but as soon as so much was done.

        Args:
            messages: messages that the app has sent; the first is the start of its response.
            bytes: bytes of the response's body that the app has sent.
            uploaded: bytes of the request's body that the app has read. The rest never arrives.
        """
        self._set(HangUpPoint(messages=messages, bytes=bytes, uploaded=uploaded))

    def never_hang_up(self) -> None:
        """Take `hang_up_at` and `hang_up_after` back."""
        self._point = NEVER

    def every_call(self, *, limit: int = 1000) -> Iterator[int]:
        """`for call in transport.every_call():` with a request in the loop's body: the client hangs
        up at the app's first call of `receive` or `send`, then at the second, and so on. Ends after
        the first round in which no client has hung up, since all was over before.

        Raises:
            RuntimeError: that round did not come within `limit`.
        """
        for call in range(1, limit + 1):
            self.hang_up_at(call=call)
            if (yield from self._one_round(call)):
                return
        raise RuntimeError(f"after {limit} calls of receive and send the app is not at its end")

    def every_turn(self, *, limit: int = 1000) -> Iterator[int]:
        """As `every_call`, but at every turn of the event loop: that is at every `await` of the app
        that waits, whatever it waits for. Raises the same."""
        for turn in range(1, limit + 1):
            self.hang_up_at(turn=turn)
            if (yield from self._one_round(turn)):
                return
        raise RuntimeError(f"after {limit} turns of the event loop the app is not at its end")

    async def ended(self) -> None:
        """Wait until every call of the app has ended; raises what one has raised after its client
        had hung up."""
        for exchange in list(self._live):
            await exchange.ended.wait()
        self._raise_failed()

    # ---- httpx ----

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Run the app for one request; returns as soon as it has sent its headers."""
        if self._group is None:
            raise RuntimeError("use the client as a context manager: its tasks need an owner")
        stream = request.stream
        exchange = Exchange(
            self.app,
            self._scope(request),
            body=await request.aread() if isinstance(stream, httpx.ByteStream) else None,
            point=self._point,
            high_water_bytes=self.high_water_bytes,
            raise_on_send=self.raise_on_send,
        )
        self._live.add(exchange)
        if self._point is not NEVER:
            self._round.append(exchange)
        self._group.start_soon(self._run, exchange)
        if isinstance(stream, httpx.AsyncByteStream) and not isinstance(stream, httpx.ByteStream):
            self._group.start_soon(exchange.upload, stream)
        if self._point.turn is not None:
            self._group.start_soon(exchange.tick, self._point.turn)
        try:
            await exchange.started.wait()
        except BaseException:
            exchange.hang_up()
            raise
        if not exchange.has_response:
            self._raise_end_of(exchange)
            if exchange.error is None:
                raise HungUp("the client was closed")
        body = _Body(exchange, self._raise_end_of)
        return httpx.Response(exchange.status, headers=exchange.headers, stream=body)

    def _raise_end_of(self, exchange: Exchange) -> None:
        """Why there is no more to read, unless the response is complete."""
        if exchange.upload_error is not None:
            raise exchange.upload_error
        if exchange.hung_up:
            raise HungUp("the client has hung up")
        if exchange.error is None:
            return
        if self.raise_app_exceptions:
            raise exchange.take_error()
        if exchange.has_response and not exchange.complete:
            raise httpx.RemoteProtocolError("the app failed in the middle of its response")

    def _set(self, point: HangUpPoint) -> None:
        given = [value for value in point if value is not None]
        if len(given) != 1 or given[0] < 1:
            raise ValueError("say exactly one time to hang up, from 1 on")
        self._point = point
        self._round = []

    def _one_round(self, number: int) -> Generator[int, None, bool]:
        try:
            yield number
        finally:
            self.never_hang_up()
        return not any(exchange.hung_up for exchange in self._round)

    def _raise_failed(self) -> None:
        failed, self._failed = self._failed, []
        for exchange in failed:
            if exchange.error is not None and self.raise_app_exceptions:
                raise exchange.take_error()

    async def _run(self, exchange: Exchange) -> None:
        try:
            await exchange.run()
        finally:
            self._live.discard(exchange)
        if exchange.error is not None:
            self._failed.append(exchange)

    def _scope(self, request: httpx.Request) -> Scope:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": self.spec_version},
            "http_version": "1.1",
            "method": request.method,
            "headers": [(k.lower(), v) for k, v in request.headers.raw],
            "scheme": request.url.scheme,
            "path": request.url.path,
            "raw_path": request.url.raw_path.split(b"?")[0],
            "query_string": request.url.query,
            "server": (request.url.host, request.url.port),
            "client": ("127.0.0.1", 1),
            "root_path": self.root_path,
            "state": self._state.copy(),
        }


class DisconnectingClient(httpx.AsyncClient):
    """`async with DisconnectingClient(app) as client:` is an `httpx.AsyncClient` whose relative
    URLs are below `http://localhost`. Options are those of `DisconnectingASGITransport`, which is
    its `transport`."""

    def __init__(self, app: ASGIApp, **options: Any) -> None:
        self.transport = DisconnectingASGITransport(app, **options)
        super().__init__(transport=self.transport, base_url=BASE_URL)


class _Body(httpx.AsyncByteStream):
    """Not a generator: trio warns about one that a client leaves in the middle."""

    def __init__(self, exchange: Exchange, raise_end_of: Callable[[Exchange], None]) -> None:
        self._exchange = exchange
        self._raise_end_of = raise_end_of

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        chunk = await self._exchange.next_chunk()
        if chunk is not None:
            return chunk
        self._raise_end_of(self._exchange)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        self._exchange.hang_up()
