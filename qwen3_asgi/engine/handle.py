"""What `Engine.submit` returns: a request that can be read and cancelled, with all its outputs."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from qwen3_asgi.engine.outbox import LoopOutbox, ThreadOutbox
from qwen3_asgi.errors import GenerationCancelled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from qwen3_asgi.engine.binding import RequestBinding
    from qwen3_asgi.engine.mailbox import Mailbox
    from qwen3_asgi.scheduler.events import Finish
    from qwen3_asgi.scheduler.plan import SampledToken


class TokenBatch(NamedTuple):
    """Every token of output `choice` that arrived since it was last read; the last has `finish`.

    If `finish.stop_token` is set, the last token is that stop token: generated and counted, but not
    part of the text.
    """

    tokens: tuple[SampledToken, ...]
    finish: Finish | None
    choice: int = 0

    @property
    def text_tokens(self) -> tuple[SampledToken, ...]:
        """Those that are part of the text: without a stop token that ended it."""
        finish = self.finish
        ended = finish is not None and finish.stop_token is not None
        return self.tokens[:-1] if ended else self.tokens


class RequestHandle:
    """One submitted request. Iterate it (`async for`) on the event loop that submitted it.

    With `n` outputs the batches of all of them come interleaved; `finish` is the first one's, set
    once all have ended. Dropping the handle cancels the request. Iteration raises instead of
    yielding when an output ends otherwise than by itself, and the others are cancelled then:

    Raises:
        ClientDisconnected: the client of the bound HTTP request has gone.
        GenerationCancelled: it was cancelled, or the engine stopped.
        GenerationFailed: the step that carried it failed.
        GenerationTimeout: its time was up.
        EngineDead: the scheduler thread failed.
    """

    def __init__(
        self,
        mailboxes: Sequence[Mailbox],
        prompt_token_ids: list[int],
        binding: RequestBinding | None,
    ) -> None:
        self.prompt_token_ids = prompt_token_ids
        self.finish: Finish | None = None
        self._mailboxes = tuple(mailboxes)  # with one outbox and one bell
        self._binding = binding
        # Outputs without their end, the next to be read first: none of them starves the others.
        self._open = deque(enumerate(mailboxes))
        self._first_finish: Finish | None = None
        self._failure: Exception | None = None

    @property
    def request_id(self) -> str:
        return self._mailboxes[0].request_id

    def cancel(self) -> None:
        """Cancel the request. Idempotent; from any thread; returns at once."""
        for mailbox in self._mailboxes:
            mailbox.cancel()
        self._unbind()

    def __aiter__(self) -> RequestHandle:
        return self

    async def __anext__(self) -> TokenBatch:
        if self.finish is not None:
            raise StopAsyncIteration
        outbox = self._mailboxes[0].outbox
        if not isinstance(outbox, LoopOutbox) or not outbox.portal.is_here:
            raise RuntimeError("a handle must be read on the event loop that submitted it")
        await self._mailboxes[0].bell.wait(self._is_ready)
        return self._take()

    def read_sync(self) -> Iterator[TokenBatch]:
        """Iterate a handle from `Engine.submit_sync` in a thread; blocks between batches."""
        outbox = self._mailboxes[0].outbox
        if not isinstance(outbox, ThreadOutbox):
            raise RuntimeError("this handle belongs to an event loop; read it with `async for`")
        while self.finish is None:
            outbox.wait(self._is_ready)
            yield self._take()

    def _is_ready(self) -> bool:
        # For each wake-up of each token: a loop, since a generator costs as much as the read.
        for _, mailbox in self._open:
            if mailbox.events or mailbox.failure is not None:
                return True
        return self._failure is not None

    def _take(self) -> TokenBatch:
        """Of the next output that is ready."""
        if self._failure is not None:
            raise self._failure
        for _, mailbox in self._open:
            if mailbox.failure is not None:
                raise self._fail(mailbox.failure)
        index, mailbox = self._open[0]
        while not mailbox.events:
            self._open.rotate(-1)
            index, mailbox = self._open[0]
        tokens = []
        finish: Finish | None = None
        for _ in range(len(mailbox.events)):
            event = mailbox.events.popleft()
            if event.token is not None:
                tokens.append(event.token)
            finish = event.finish
        if finish is None:
            self._open.rotate(-1)
        elif finish.reason == "error" or finish.reason == "abort":
            raise self._fail(finish.error or GenerationCancelled("the request was cancelled"))
        else:
            self._open.popleft()
            if index == 0:
                self._first_finish = finish
            if not self._open:
                self._unbind()
                self.finish = self._first_finish
        return TokenBatch(tuple(tokens), finish, index)

    def _fail(self, failure: Exception) -> Exception:
        # Kept, so that whoever reads again gets it again and does not wait forever.
        self._failure = failure
        self.cancel()
        return failure

    def _unbind(self) -> None:
        if self._binding is not None:
            for mailbox in self._mailboxes:
                self._binding.unbind(mailbox)

    def __del__(self) -> None:
        # May run in any thread, in the middle of anything: `cancel` is lock-free for that reason.
        self.cancel()
