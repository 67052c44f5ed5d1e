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
        return error_response(error, param=error.field if isinstance(error, BadRequest) else None)

    @app.exception_handler(RequestValidationError)
    async def refuse_fields(_: Request, error: RequestValidationError) -> Response:
        param, message = _first_mistake(error)
        return error_response(BadRequest(message), param=param)

    @app.exception_handler(HTTPException)
    async def refuse_call(_: Request, error: HTTPException) -> Response:
        if isinstance(error.__cause__, VLoraError):
            return error_response(error.__cause__)
        unreadable = isinstance(error.__cause__, RecursionError | ValueError)  # by Python's reader of JSON
        said = "the body cannot be read: it is nested too deep, or has a number that is too long"
        response = error_response(BadRequest(said if unreadable else str(error.detail)), status=error.status_code)
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def confess(_: Request, error: Exception) -> Response:
        return error_response(VLoraError(f"the server made a mistake: {type(error).__name__}; its log says more"))


def _first_mistake(error: RequestValidationError) -> tuple[str | None, str]:
    """The field, if it is one's, and what is wrong."""
    mistakes = error.errors()
    mistake = mistakes[0]
    match mistake["type"], mistake["loc"]:
        case "json_invalid", (_, place):
            return None, f"the body is no JSON: {mistake['ctx']['error']} at character {place}"
        case "missing", ("body",):
            return None, "the body is empty; send a JSON object"
        case _, ("body",) if mistake["type"].endswith("_type"):
            return None, "the body is no JSON object; send one, with Content-Type: application/json"
        case "string_type", (*field, "str"):
            # Where text or a list is taken, what is wrong with a list comes behind the remark that it is no text.
            inside = [each for each in mistakes if list(each["loc"][: len(field)]) == field]
            mistake = next((each for each in inside[1:] if each["type"] != "list_type"), mistake)
    forms = ("str",) if mistake["type"] == "string_type" else ()
    steps = [str(step) for step in mistake["loc"] if step not in ("body", *forms)]
    field_name = ".".join(step for step in steps if not step.startswith("list[")) or None
    if mistake["type"] == "extra_forbidden":
        return field_name, f"{field_name}: this field is not served"
    return field_name, f"{field_name or 'body'}: {str(mistake['msg']).removeprefix('Value error, ')}"
