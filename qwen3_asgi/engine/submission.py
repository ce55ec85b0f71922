"""From a checked ask to a handle: bounds, the scheduler's requests, their mailboxes, the binding.

Nothing here awaits, so a request can't be left without an owner.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING

import anyio

from qwen3_asgi.engine.binding import current_binding
from qwen3_asgi.engine.handle import RequestHandle
from qwen3_asgi.engine.intake import make_requests
from qwen3_asgi.engine.mailbox import Mailbox
from qwen3_asgi.engine.outbox import LoopBell
from qwen3_asgi.engine.portal import wait_future
from qwen3_asgi.errors import EngineOverloaded, GenerationTimeout, InvalidRequest
from qwen3_asgi.scheduler.pace import retry_after
from qwen3_asgi.scheduler.request import check_fits

if TYPE_CHECKING:
    from concurrent.futures import Future

    from qwen3_asgi.config import EngineConfig
    from qwen3_asgi.engine.intake import Ask
    from qwen3_asgi.engine.lifecycle import Runtime
    from qwen3_asgi.engine.outbox import Outbox
    from qwen3_asgi.metrics.recorder import EngineMetrics

LATE = "the time was up before the engine had started"


def check_choices(n: int, config: EngineConfig) -> None:
    """
    Raises:
        InvalidRequest: this engine never makes so many outputs of one request.
    """
    most = min(config.max_n, config.max_queue + config.max_batch)
    if n > most:
        raise InvalidRequest(f"n must be at most {most}, got {n}", param="n")


def seconds_allowed(ask: Ask, config: EngineConfig) -> float | None:
    """From its arrival to its end."""
    limits = [limit for limit in (ask.timeout, config.max_timeout) if limit is not None]
    return min(limits, default=None)


async def within(seconds: float | None, started: Future[Runtime]) -> Runtime:
    """
    Raises:
        GenerationTimeout: the time was up before the engine had started.
    """
    if seconds is None or started.done():
        return await wait_future(started)
    with anyio.move_on_after(seconds):
        return await wait_future(started)
    raise GenerationTimeout(LATE)


def within_sync(seconds: float | None, started: Future[Runtime]) -> Runtime:
    """`within` for threads."""
    try:
        return started.result(seconds)
    except TimeoutError:
        raise GenerationTimeout(LATE) from None


def submit(
    runtime: Runtime,
    ask: Ask,
    token_ids: list[int],
    arrival: float,
    outbox: Outbox,
    config: EngineConfig,
    metrics: EngineMetrics,
) -> RequestHandle:
    """Hand the request over to the scheduler, as one command whatever its `n`.

    Raises:
        ContextLengthExceeded, ClientDisconnected, EngineOverloaded: it is not taken.
        InvalidRequest: there is no such adapter.
        EngineDead: the scheduler has ended.
    """
    params = ask.sampling_params
    if ask.adapter is not None:
        runtime.adapters.check(ask.adapter)
    check_fits(len(token_ids), params.max_tokens, runtime.scheduler.limits, param=ask.param)
    binding = current_binding.get()
    if binding is not None:
        binding.check()
    seconds = seconds_allowed(ask, config)
    requests = make_requests(
        uuid.uuid4().hex,
        token_ids,
        ask,
        runtime.model,
        arrival=arrival,
        deadline=None if seconds is None else arrival + seconds,
    )
    bell = LoopBell()
    mailboxes = [
        Mailbox(
            request.id,
            outbox,
            runtime.scheduler.cancel,
            metrics.on_client_disconnect,
            bell=bell,
            # The others share the first one's prefill.
            unprefilled=len(token_ids) if request.fork_of is None else 0,
        )
        for request in requests
    ]

    def check(live: int, unprefilled: int) -> None:
        _check_room(runtime, config, live, unprefilled, params.n, len(token_ids))

    runtime.delivery.register(*mailboxes, check=check)
    spans = runtime.spans
    if spans is not None:
        spans.open(requests)
    try:
        runtime.scheduler.submit(*requests)
    except BaseException:
        runtime.delivery.forget(*mailboxes)
        if spans is not None:
            spans.forget(requests)
        raise
    runtime.watchdog.notice()
    handle = RequestHandle(mailboxes, token_ids, binding)
    if binding is not None:
        for mailbox in mailboxes:
            binding.bind(mailbox)
    return handle


def _check_room(
    runtime: Runtime, config: EngineConfig, live: int, unprefilled: int, n: int, prompt_tokens: int
) -> None:
    """
    Raises:
        EngineOverloaded: the queue is full.
    """
    limit = config.max_queue_tokens
    if live + n > config.max_queue + config.max_batch:
        message = f"{live} requests are live; the queue takes {config.max_queue}"
    # A prompt that is longer than the bound comes in when nothing else waits: it would never, else.
    elif limit is not None and unprefilled and unprefilled + prompt_tokens > limit:
        message = f"{unprefilled} prompt tokens are waiting; the queue takes {limit}"
    else:
        return
    load = runtime.scheduler.load
    seconds = retry_after(max(0, live - load.num_running), load.finish_rate)
    raise EngineOverloaded(message, retry_after=seconds)
