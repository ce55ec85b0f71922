"""The request models of the two adapter routes, with vLLM's field names."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class LoadAdapterRequest(BaseModel):
    """Body of `POST /v1/load_lora_adapter`. An adapter of the same name is always replaced."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    lora_name: str
    lora_path: str
    load_inplace: Literal[True] | None = None


class UnloadAdapterRequest(BaseModel):
    """Body of `POST /v1/unload_lora_adapter`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    lora_name: str
