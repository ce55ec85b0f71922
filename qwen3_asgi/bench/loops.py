"""The event loops a benchmark can run on, and one request as a server's own task on each."""

from __future__ import annotations

import asyncio
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeVar, get_args

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine

T = TypeVar("T")
LoopName = Literal["asyncio", "uvloop", "trio"]


def chosen_loops(name: LoopName | None) -> tuple[LoopName, ...]:
    """The one that was asked for, or all that are installed; asyncio always is.

    Raises:
        ValueError: it is not installed.
    """
    installed = tuple(each for each in get_args(LoopName) if find_spec(each))
    if name is None:
        return installed
    if name not in installed:
        raise ValueError(f"{name} is not installed")
    return (name,)


def run_on(loop: LoopName, main: Callable[[], Awaitable[T]]) -> T:
    """`main` in a new event loop of this kind."""
    if loop == "trio":
        return anyio.run(main, backend="trio")
    return anyio.run(main, backend_options={"use_uvloop": loop == "uvloop"})


async def as_task(call: Callable[[], Coroutine[object, object, None]]) -> None:
    """Run `call` to its end in a new native task, as servers run a request.

    Not in an anyio task group: what anyio keeps for its own tasks it would have to make for those
    of a server, and that is part of what is measured.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        import trio

        async with trio.open_nursery() as nursery:
            nursery.start_soon(call)
    else:
        await asyncio.create_task(call())
