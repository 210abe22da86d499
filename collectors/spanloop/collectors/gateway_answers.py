"""Failures as answers in OpenAI's words."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from spanloop.collectors.gateway_call import Call, GatewayError

__all__ = ["CALL", "Handler", "no_answer", "told"]

_log = logging.getLogger(__name__)

CALL: web.RequestKey[Call] = web.RequestKey("call", Call)
"""The call of a request, once it was read."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def told(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or its failure as an answer."""
    call_error = ""
    try:
        return await handler(request)
    except GatewayError as exc:
        call_error, reply = exc.code, exc.response()
    except web.HTTPException as exc:
        message = f"{request.method} {request.path}: {exc.reason}"
        code = exc.reason.lower().replace(" ", "_")
        reply = GatewayError(exc.status, message, kind="invalid_request_error", code=code).response()
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        message = "the gateway failed; its log has the traceback"
        call_error, reply = "gateway_failed", GatewayError(500, message, kind="internal_error", code="gateway_failed").response()  # fmt: skip
    call = request.get(CALL)
    if call is not None and not call.error:
        call.error = call_error
    return reply


def no_answer(response_id: str) -> GatewayError:
    message = f"Response with id '{response_id[:64]}' not found."
    return GatewayError(404, message, kind="invalid_request_error", code="response_not_found")
