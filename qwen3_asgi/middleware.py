"""Door 2: `app.add_middleware(DisconnectMiddleware)` for a host's own endpoints."""

from __future__ import annotations

from qwen3_asgi.asgi.watch import DisconnectWatch


class DisconnectMiddleware(DisconnectWatch):
    """Cancels what a gone client started, anywhere in the host app.

    Every generation started inside a request (on any task or thread of it) is cancelled in the
    scheduler as soon as the server reports the disconnect, and the waiting `generate`, `stream` or
    `generate_sync` raises `ClientDisconnected`, so that the handler can clean up. Requests that
    never touch the engine are left alone; `cancel="request"`, or a predicate on the scope, opts in
    to cancelling the app's task as well.
    """
