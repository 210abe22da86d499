"""Blocks around functions of every kind: plain, async, generators and async generators.

A generator's block is entered at its first step and left at its end; between steps the caller's context is its own again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncGenerator, Callable, Generator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanloop.collectors.sdk._blocks import Block

__all__ = ["wrap"]


def wrap(function: Callable[..., Any], fresh: Callable[[], Block]) -> Any:
    """``function`` with a block of its own around each call; it looks the same to ``inspect``."""
    if inspect.isasyncgenfunction(function):
        return _async_generator(function, fresh)
    if inspect.isgeneratorfunction(function):
        return _generator(function, fresh)
    called = getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is async
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called):

        @functools.wraps(function)
        async def awaited(*args: Any, **kwargs: Any) -> Any:
            with fresh():
                return await function(*args, **kwargs)

        return awaited

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        with fresh():
            return function(*args, **kwargs)

    return plain


def _generator(function: Callable[..., Any], fresh: Callable[[], Block]) -> Callable[..., Any]:
    @functools.wraps(function)
    def stepped(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        steps = function(*args, **kwargs)
        block = fresh()
        with block:
            block.suspend()
            sent, thrown = None, None
            while True:
                block.resume()
                try:
                    item = steps.send(sent) if thrown is None else steps.throw(thrown)
                except StopIteration as stop:
                    return stop.value
                finally:
                    block.suspend()
                try:
                    sent, thrown = (yield item), None
                except GeneratorExit:
                    block.resume()
                    try:
                        steps.close()
                    finally:
                        block.suspend()
                    raise
                except BaseException as exc:
                    sent, thrown = None, exc

    return stepped


def _async_generator(function: Callable[..., Any], fresh: Callable[[], Block]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def stepped(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        steps = function(*args, **kwargs)
        block = fresh()
        with block:
            block.suspend()
            sent, thrown = None, None
            while True:
                block.resume()
                try:
                    item = await (steps.asend(sent) if thrown is None else steps.athrow(thrown))
                except StopAsyncIteration:
                    return
                finally:
                    block.suspend()
                try:
                    sent, thrown = (yield item), None
                except GeneratorExit:
                    block.resume()
                    try:
                        await steps.aclose()
                    finally:
                        block.suspend()
                    raise
                except BaseException as exc:
                    sent, thrown = None, exc

    return stepped
