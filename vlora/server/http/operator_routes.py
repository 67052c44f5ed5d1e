"""The HTTP routes of an operator: rows over `vlora.operations`."""

from __future__ import annotations

import collections
import functools
import inspect
import re
import typing
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from fastapi import Depends, FastAPI, File, Query, Request, UploadFile
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from pydantic import BaseModel, Field, create_model, field_validator

from vlora import operations as op
from vlora.config import Token
from vlora.errors import BadRequest
from vlora.server.frontend import FrontEnd, choice_id
from vlora.server.http.middleware import ADAPTER_PATHS
from vlora.server.http.sampling_fields import StrictModel
from vlora.server.operations import check_permitted, perform
from vlora.server.security.access import caller_of
from vlora.server.security.public_errors import shown_to

TRAINING_PATHS, CLUSTER_PATHS = "/v1/trainings", "/v1/cluster"
LEARNING_PATHS, CAMERA_PATHS = "/v1/learning", "/v1/cameras"
LORA_PATHS = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")  # as of vLLM

_QUERY: Mapping[str, Any] = {
    "drain": bool,
    "wait_s": Annotated[float, Query(ge=0, le=op.MAX_WAIT_S, allow_inf_nan=False)],
}
"""The fields of operations that are in the query; those of a path are in it, and all others in the body."""


class CorrectionBody(StrictModel):
    """id: of the completion. choice: of several answers. label: the right answer."""

    id: str
    choice: int = Field(0, ge=0, le=2**31)
    label: str


class ScaleBody(StrictModel):
    """replicas: their number, or "auto" for automatic scaling."""

    replicas: int | Literal["auto"]

    @field_validator("replicas", mode="before")
    @classmethod
    def _check(cls, value: Any) -> Any:
        if value != "auto" and (isinstance(value, bool) or not isinstance(value, int)):
            raise ValueError('it must be a whole number, or "auto"')
        return value


class Row(NamedTuple):
    """A route. status: of a success. fixed: fields of the operation. body: a model of the others. name: for OpenAPI's
    operation id, if it is not the operation's. names: vLLM's, of the operation's fields. more: vLLM's others.
    whole: the field that is the whole body."""

    method: str
    path: str
    operation: type[op.Operation]
    status: int = 200
    fixed: Mapping[str, Any] = {}
    body: type[BaseModel] | None = None
    name: str = ""
    names: Mapping[str, str] = {}
    more: Mapping[str, tuple[Any, Any]] = {}
    whole: str = ""


_PIN = ADAPTER_PATHS + "/{name}/pin"
_DRAIN = CLUSTER_PATHS + "/replicas/{name}/drain"
_LORA = {"name": "lora_name", "path": "lora_path"}
_IN_PLACE, _NUMBER = {"load_inplace": (bool, False)}, {"lora_int_id": (int | None, None)}
_LOADED = "has already been loaded. If you want to load the adapter in place, set 'load_inplace' to True."

ROWS = (
    Row("GET", ADAPTER_PATHS, op.GetAdapters, name="adapters"),
    Row("POST", ADAPTER_PATHS, op.LoadAdapter, 201),
    Row("PUT", ADAPTER_PATHS + "/{name}", op.UploadAdapter),
    Row("DELETE", ADAPTER_PATHS + "/{name}", op.UnloadAdapter, 204),
    Row("PUT", _PIN, op.PinAdapter, fixed={"pinned": True}),
    Row("DELETE", _PIN, op.PinAdapter, fixed={"pinned": False}, name="unpin_adapter"),
    Row("GET", TRAINING_PATHS, op.ListTrainings, name="trainings"),
    Row("POST", TRAINING_PATHS, op.Train, 201),
    Row("DELETE", TRAINING_PATHS + "/{name}", op.CancelTraining),
    Row("POST", "/v1/corrections", op.Correct, body=CorrectionBody),
    Row("GET", LEARNING_PATHS, op.GetLearning, name="statuses"),
    Row("POST", LEARNING_PATHS + "/{name}/promote", op.Promote),
    Row("POST", LEARNING_PATHS + "/{name}/rollback", op.RollBack),
    Row("GET", CLUSTER_PATHS, op.GetCluster, name="status"),
    Row("PUT", CLUSTER_PATHS + "/scale", op.Scale, body=ScaleBody),
    Row("PUT", _DRAIN, op.DrainReplica, name="drain"),
    Row("DELETE", _DRAIN, op.ResumeReplica, name="resume"),
    Row("POST", LORA_PATHS[0], op.LoadAdapter, name="load_lora_adapter", names=_LORA, more=_IN_PLACE),
    Row("POST", LORA_PATHS[1], op.UnloadAdapter, name="unload_lora_adapter", names=_LORA, more=_NUMBER),
    Row("GET", CAMERA_PATHS, op.GetCameras, name="cameras"),
    Row("GET", CAMERA_PATHS + "/{name}/frame", op.GetFrame),
    Row("POST", CAMERA_PATHS, op.AddCamera, 201, whole="camera"),
    Row("PATCH", CAMERA_PATHS + "/{name}", op.ChangeCamera, whole="changes"),
    Row("DELETE", CAMERA_PATHS + "/{name}", op.RemoveCamera, 204),
)

_TEXTS = {
    "adapters": f"{op.GetAdapters.__doc__} A server with replicas adds where each adapter is.",
    "load_lora_adapter": "Register an adapter folder on the server's file system, with vLLM's fields and answer.",
    "unload_lora_adapter": "Remove an adapter and cancel its requests, with vLLM's fields and answer.",
    "unpin_adapter": "Unpin an adapter, so that it can be evicted.",
    "scale": "Have another number of replicas, or let the load decide; 202 while it is not done.",
    "drain": "Move a replica's requests to others, and send it no further ones; 202 while it still has requests.",
}
"""Where the route differs from the operation."""


def add_operator_routes(app: FastAPI, front_end: FrontEnd) -> None:
    for row in ROWS:
        name = row.name or re.sub("(?<=[a-z])(?=[A-Z])", "_", row.operation.__name__).lower()
        app.add_api_route(
            row.path,
            _endpoint(front_end, row),
            methods=[row.method],
            name=name,
            description=_TEXTS.get(name, row.operation.__doc__),
            status_code=row.status,
            response_model=None,
            dependencies=[Depends(functools.partial(_check_permitted, row.operation))],
        )


async def _check_permitted(kind: type[op.Operation], request: Request) -> None:
    check_permitted(kind, caller_of(request), _origin(request))


def _origin(request: Request) -> str:
    return f"http {request.client.host if request.client else 'unknown'}"


def _endpoint(front_end: FrontEnd, row: Row) -> Callable[..., Coroutine[Any, Any, Response]]:
    parameters: dict[str, tuple[Any, Any]] = {"request": (Request, ...)}
    in_body: dict[str, Any] = dict(row.more)
    hints = typing.get_type_hints(row.operation)
    for field in msgspec.structs.fields(row.operation):
        default = ... if field.required else field.default
        if f"{{{field.name}}}" in row.path:
            parameters[field.name] = (str, ...)
        elif field.name in _QUERY:
            parameters[field.name] = (_QUERY[field.name], default)
        elif field.name == "files":
            parameters[field.name] = (Annotated[list[UploadFile], File()], default)
        elif field.name not in row.fixed:
            in_body[row.names.get(field.name, field.name)] = (hints[field.name], default)
    if row.whole:
        parameters["body"] = (hints[row.whole], ...)
    elif in_body:
        kind = f"{row.operation.__name__}{'Lora' if row.names else ''}Body"
        model = row.body or create_model(kind, __base__=StrictModel, **in_body)
        parameters["body"] = (model, ...)

    async def call(request: Request, body: BaseModel | dict[str, Any] | None = None, **fields: Any) -> Response:
        if isinstance(body, dict):
            fields[row.whole] = body
        elif isinstance(body, CorrectionBody):
            fields |= {"request_id": choice_id(re.sub("^chatcmpl-", "", body.id), body.choice), "label": body.label}
        elif body is not None:
            given = body.model_dump()
            names = (
                [each.name for each in await front_end.adapters.list()] if given.get("load_inplace") is False else ()
            )
            if given.get("lora_name") in names:
                raise BadRequest(f"The lora adapter '{given['lora_name']}' {_LOADED}", field="lora_name")
            own = {row.names.get(name, name): name for name in row.operation.__struct_fields__}
            fields |= {own[name]: value for name, value in given.items() if name in own}
        if "files" in fields:
            fields["files"] = {each.filename or "": await each.read() for each in fields["files"]}
        caller = caller_of(request)
        found = await perform(front_end, row.operation(**row.fixed, **fields), caller, _origin(request))
        if row.names:
            done = "added" if row.operation is op.LoadAdapter else "removed"
            return PlainTextResponse(f"Success: LoRA adapter '{fields['name']}' {done} successfully.")
        return await _response(front_end, row, found, caller)

    call.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=_default(default))
            for name, (kind, default) in parameters.items()
        ]
    )
    return call


def _default(value: Any) -> Any:
    return inspect.Parameter.empty if value is ... else value


async def _response(front_end: FrontEnd, row: Row, result: Any, caller: Token | None) -> Response:
    if row.operation in (op.DrainReplica, op.ResumeReplica, op.Scale):  # 202: the change goes on
        assert front_end.cluster is not None
        done, status = result is not False, front_end.cluster.status()
        return JSONResponse({"done": done, **msgspec.to_builtins(status)}, row.status if done else 202)
    if result is None:
        return Response(status_code=row.status)
    if isinstance(result, bytes):
        return Response(result, media_type="image/jpeg")
    found = msgspec.to_builtins(shown_to(result, caller))
    if row.operation is op.GetAdapters and front_end.cluster is not None:  # a cluster adds where each adapter is
        places = collections.defaultdict(list)
        for place in shown_to(await front_end.cluster.adapter_places(), caller):
            places[place.adapter].append(msgspec.to_builtins(place))
        for adapter in found:
            adapter["replicas"] = places[adapter["name"]]
    return JSONResponse({"object": "list", "data": found} if isinstance(found, list | tuple) else found, row.status)
