"""What `Engine.submit` returns: a request that can be read and cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from qwen3_asgi.engine.outbox import LoopOutbox, ThreadOutbox
from qwen3_asgi.errors import GenerationCancelled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from qwen3_asgi.engine.binding import RequestBinding
    from qwen3_asgi.engine.mailbox import Mailbox
    from qwen3_asgi.scheduler.events import Finish
    from qwen3_asgi.scheduler.plan import SampledToken


class TokenBatch(NamedTuple):
    """Every token that arrived since the last read; the last batch has `finish`.

    If `finish.stop_token` is set, the last token is that stop token: generated and counted, but not
    part of the text.
    """

    tokens: tuple[SampledToken, ...]
    finish: Finish | None

    @property
    def text_tokens(self) -> tuple[SampledToken, ...]:
        """Those that are part of the text: without a stop token that ended it."""
        finish = self.finish
        ended = finish is not None and finish.stop_token is not None
        return self.tokens[:-1] if ended else self.tokens


class RequestHandle:
    """One submitted request. Iterate it (`async for`) on the event loop that submitted it.

    Dropping the handle cancels the request. Iteration raises instead of yielding when the request
    ends otherwise than by itself:

    Raises:
        ClientDisconnected: the client of the bound HTTP request has gone.
        GenerationCancelled: it was cancelled, or the engine stopped.
        GenerationFailed: the step that carried it failed.
        EngineDead: the scheduler thread failed.
    """

    def __init__(
        self,
        mailbox: Mailbox,
        prompt_token_ids: list[int],
        binding: RequestBinding | None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.finish: Finish | None = None
        self._mailbox = mailbox
        self._binding = binding

    @property
    def request_id(self) -> str:
        return self._mailbox.request_id

    def cancel(self) -> None:
        """Cancel the request. Idempotent; from any thread; returns at once."""
        self._mailbox.cancel()
        self._unbind()

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> TokenBatch:
        if self.finish is not None:
            raise StopAsyncIteration
        mailbox = self._mailbox
        outbox = mailbox.outbox
        if not isinstance(outbox, LoopOutbox) or not outbox.portal.is_here:
            raise RuntimeError("a handle must be read on the event loop that submitted it")
        await mailbox.bell.wait(mailbox.is_ready)
        return self._take()

    def read_sync(self) -> Iterator[TokenBatch]:
        """Iterate a handle from `Engine.submit_sync` in a thread; blocks between batches."""
        mailbox = self._mailbox
        outbox = mailbox.outbox
        if not isinstance(outbox, ThreadOutbox):
            raise RuntimeError("this handle belongs to an event loop; read it with `async for`")
        while self.finish is None:
            outbox.wait(mailbox.is_ready)
            yield self._take()

    def _take(self) -> TokenBatch:
        mailbox = self._mailbox
        if mailbox.failure is not None:
            self._unbind()
            raise mailbox.failure
        tokens = []
        finish: Finish | None = None
        for _ in range(len(mailbox.events)):
            event = mailbox.events.popleft()
            if event.token is not None:
                tokens.append(event.token)
            finish = event.finish
        if finish is not None:
            self._unbind()
            if finish.reason == "error" or finish.reason == "abort":
                # Kept, so that whoever reads again gets it again and does not wait forever.
                mailbox.failure = finish.error or GenerationCancelled("the request was cancelled")
                raise mailbox.failure
            self.finish = finish
        return TokenBatch(tuple(tokens), finish)

    def _unbind(self) -> None:
        if self._binding is not None:
            self._binding.unbind(self._mailbox)

    def __del__(self) -> None:
        # May run in any thread, in the middle of anything: `cancel` is lock-free for that reason.
        self._mailbox.cancel()
        self._unbind()
