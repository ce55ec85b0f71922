"""The one small tree of errors that callers meet. HTTP status codes live in `asgi/`, not here."""

from __future__ import annotations


class Qwen3Error(Exception):
    """Root of every error this package raises on purpose."""


class InvalidRequest(Qwen3Error, ValueError):
    """A request that is wrong in itself; `param` names the field, `code` is a stable string."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value"
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus `max_tokens` can never fit; the message holds both numbers."""

    def __init__(self, message: str, *, param: str | None = "messages") -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class ModelLoadError(Qwen3Error):
    """The checkpoint cannot be used: missing file, wrong shape, architecture or quantisation."""


class EngineNotReady(Qwen3Error):
    """The engine is starting, draining or stopped; `retry_after` is in seconds."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineOverloaded(Qwen3Error):
    """The waiting queue is full; `retry_after`, in seconds, follows from how fast others finish."""

    def __init__(self, message: str, *, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class GenerationTimeout(Qwen3Error):
    """The request was not finished by its deadline."""


class EngineDead(Qwen3Error):
    """The scheduler thread has ended by an error; the engine must be restarted."""


class GenerationFailed(Qwen3Error):
    """The step that carried this request failed; other requests go on."""


class GenerationCancelled(Qwen3Error):
    """The request was cancelled through its handle, or by `Engine.stop`, before it finished."""


class ClientDisconnected(Qwen3Error):
    """The HTTP client of the request that this generation is bound to has gone."""
