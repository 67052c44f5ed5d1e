"""Every failure as OpenAI's error body, with the status its class has."""

from __future__ import annotations

import logging

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from vlora.errors import BadRequest, DeadlineUnreachable, OverCapacity, Unauthorized, VLoraError

log = logging.getLogger(__name__)

_KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ErrorDetail(BaseModel):
    """message: what was wrong, which value, what to do. code: one of V-LoRA's own. param: the field, if it was one."""

    message: str
    type: str
    code: str
    param: str | None


class ErrorBody(BaseModel):
    error: ErrorDetail


def error_body(error: VLoraError, *, status: int | None = None, param: str | None = None) -> dict[str, object]:
    status = error.http_status if status is None else status
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    # What a caller wrote may hold half a character, which no answer can carry.
    message = str(error).encode(errors="replace").decode()
    param = None if param is None else param.encode(errors="replace").decode()
    return {"error": {"message": message, "type": kind, "code": error.code, "param": param}}


def error_response(error: VLoraError, *, status: int | None = None, param: str | None = None) -> Response:
    headers: dict[str, str] = {}
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    elif isinstance(error, OverCapacity | DeadlineUnreachable):
        headers["Retry-After"] = "1"
    body = error_body(error, status=status, param=param)
    return JSONResponse(body, error.http_status if status is None else status, headers)


def handle_errors(app: FastAPI) -> None:
    """Answer every exception of the app in this form."""

    @app.exception_handler(VLoraError)
    async def refuse(_: Request, error: VLoraError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def refuse_fields(_: Request, error: RequestValidationError) -> Response:
        place, message = _first_mistake(error)
        return error_response(BadRequest(f"{place or 'body'}: {message}"), param=place or None)

    @app.exception_handler(HTTPException)
    async def refuse_call(_: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, VLoraError):
            return error_response(error.__cause__)
        response = error_response(BadRequest(str(error.detail)), status=error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def confess(_: Request, error: Exception) -> Response:
        return error_response(VLoraError(f"the server made a mistake: {type(error).__name__}; its log says more"))


def _first_mistake(error: RequestValidationError) -> tuple[str, str]:
    """The field and what is wrong with it."""
    mistake = error.errors()[0]
    place = ".".join(str(step) for step in mistake["loc"] if step != "body")
    if mistake["type"] == "extra_forbidden":
        return place, "this field is not served"
    return place, str(mistake["msg"]).removeprefix("Value error, ")
