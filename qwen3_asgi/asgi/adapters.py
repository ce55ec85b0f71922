"""The routes that load and unload LoRA adapters, for hosts that name the folders they may be in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

from starlette.responses import Response

from qwen3_asgi.asgi.body import read_body
from qwen3_asgi.asgi.errors import error_response, logger
from qwen3_asgi.asgi.responses import encode_json
from qwen3_asgi.asgi.status import adapter_entry
from qwen3_asgi.errors import ClientDisconnected, InvalidRequest, Qwen3Error
from qwen3_asgi.openai.adapters import LoadAdapterRequest, UnloadAdapterRequest
from qwen3_asgi.openai.parsing import parse_request

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from pydantic import BaseModel
    from starlette.requests import Request

    from qwen3_asgi.asgi.serving import PathLike, ServingEngine

Model = TypeVar("Model", bound="BaseModel")
MAX_BODY_BYTES = 64 * 1024


class AdapterRoutes:
    """`folders`: where adapters may be loaded from; without any, both routes refuse.

    Raises:
        ValueError: a folder is an empty string.
    """

    def __init__(
        self, engine: ServingEngine, folders: PathLike | Sequence[PathLike], created: int
    ) -> None:
        given = [folders] if isinstance(folders, (str, os.PathLike)) else folders
        if not all(os.fspath(folder) for folder in given):
            raise ValueError("lora_folders must not be empty strings")
        self._engine = engine
        # Now: the host may change its working directory later.
        self._folders = [f if os.path.isabs(f) else os.path.abspath(f) for f in given]
        self._created = created

    async def load(self, request: Request) -> Response:
        """`POST /v1/load_lora_adapter`: answers when requests can name it."""
        return await self._answer(request, LoadAdapterRequest, self._load)

    async def unload(self, request: Request) -> Response:
        """`POST /v1/unload_lora_adapter`: answers when the last request that uses it has ended."""
        return await self._answer(request, UnloadAdapterRequest, self._unload)

    async def _answer(
        self,
        request: Request,
        model: type[Model],
        carry_out: Callable[[Model], Awaitable[dict[str, object]]],
    ) -> Response:
        try:
            body = await read_body(request.scope, request.receive, MAX_BODY_BYTES)
            if not self._folders:
                raise InvalidRequest(
                    "adapters are not loaded over HTTP here; the app allows it by "
                    "create_app(engine, lora_folders=[...])",
                    code="lora_loading_disabled",
                )
            payload = await carry_out(parse_request(body, model))
        except ClientDisconnected:
            raise
        except Qwen3Error as error:
            if not isinstance(error, InvalidRequest):
                logger.warning("an adapter was not changed: %s", error)
            return error_response(error)
        return Response(encode_json(payload), media_type="application/json")

    async def _load(self, asked: LoadAdapterRequest) -> dict[str, object]:
        info = await self._engine.load_adapter(
            asked.lora_name, asked.lora_path, within=self._folders
        )
        return adapter_entry(info, self._engine.model_name, self._created)

    async def _unload(self, asked: UnloadAdapterRequest) -> dict[str, object]:
        await self._engine.unload_adapter(asked.lora_name)
        return {"id": asked.lora_name, "object": "model", "deleted": True}
