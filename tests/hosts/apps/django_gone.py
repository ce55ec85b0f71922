"""A Django middleware, so that no view needs to catch `ClientDisconnected` itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.http import HttpResponse
from django.utils.deprecation import MiddlewareMixin

from qwen3_asgi import ClientDisconnected

if TYPE_CHECKING:
    from django.http import HttpRequest


class AnswerTheGone(MiddlewareMixin):
    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        return HttpResponse(status=499) if isinstance(error, ClientDisconnected) else None
