"""`vlora mcp`: a running server as tools of the Model Context Protocol."""

from __future__ import annotations

import base64
import binascii
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from vlora.cli.group import cli
from vlora.cli.options import FILE, FOLDER, command, flag
from vlora.errors import BadImage, VLoraError
from vlora.operations import GetCameras, GetFrame

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

    from vlora.client import Client

_INSTRUCTIONS = "Questions about pictures, cameras and recordings, answered by a vision-language model."


def make_server(client: Client, index: Path | None, pictures: Path | None) -> MCPServer:
    """The tools. Their docstrings are for the model that calls them.

    Args:
        index: Of `vlora index`; None for no tool that searches.
        pictures: The folder of files that may be asked about.
    """
    from mcp.server.mcpserver import Image, MCPServer
    from mcp.server.mcpserver.exceptions import ToolError
    from mcp_types import ToolAnnotations

    server: MCPServer = MCPServer("vlora", instructions=_INSTRUCTIONS, log_level="WARNING")

    def offered(tool: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(tool)
        def call(**arguments: Any) -> Any:
            try:
                return tool(**arguments)
            except VLoraError as error:
                raise ToolError(str(error)) from error

        return server.tool(description=inspect.getdoc(tool), annotations=ToolAnnotations(read_only_hint=True))(call)

    @offered
    def list_cameras() -> list[dict[str, Any]]:
        """List the cameras: name, state, health, and their last events with time, label and confidence."""
        found: list[dict[str, Any]] = msgspec.to_builtins(client.call(GetCameras()))
        return found

    @offered
    def ask_camera(camera: str, question: str, adapter: str | None = None, show: bool = False) -> Any:
        """Answer a question about what a camera sees now. adapter: a name of the server; show: also return the picture.

        The names of cameras are those of list_cameras.
        """
        frame = client.call(GetFrame(camera))
        text = client.generate(question, [frame], adapter).text
        return [text, Image(data=frame, format="jpeg")] if show else text

    @offered
    def ask_picture(picture: str, question: str, adapter: str | None = None) -> str:
        """Answer a question about a picture: a data URL, or a file's path in the folder that is allowed."""
        return client.generate(question, [_read(picture, pictures)], adapter).text

    if index is None:
        return server

    @offered
    def search_recordings(query: str, top: int = 5, adapter: str | None = None) -> list[dict[str, Any]]:
        """Search the recordings for what a text describes: the best clips with file, start in seconds, and reasons.

        score: from 0 to 1, how far the clip fits.
        """
        from apps.retrieval import RetrievalIndex, search

        with RetrievalIndex(index) as opened:
            hits = search(client, opened, query, adapter=adapter, top=top)
        return [
            {"file": hit.source, "start_s": hit.start_s, "seconds": hit.seconds, "score": hit.score, "why": hit.why()}
            for hit in hits
        ]

    return server


def _read(picture: str, folder: Path | None) -> bytes | Path:
    if picture.startswith("data:"):
        try:
            return base64.b64decode(picture.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise BadImage(f"the data URL is not base64: {error}") from error
    if folder is not None and (path := (folder / picture).resolve()).is_relative_to(folder.resolve()):
        return path
    raise BadImage(f"{picture[:100]!r} is not a data URL, nor a file in the folder of --pictures")


@command(cli, needs="mcp")
def mcp(
    index: Path | None = flag(
        None,
        "Index of `vlora index`, which the tool search_recordings searches. Default: no such tool.",
        "-i",
        type=FILE,
    ),
    pictures: Path | None = flag(
        None, "Folder of pictures that ask_picture may read. Default: data URLs only.", type=FOLDER
    ),
    http_port: int | None = flag(
        None, "Serve streamable HTTP on this port of 127.0.0.1, not stdio.", least=1, most=65535
    ),
    *,
    client: Client,
) -> None:
    """Offer a server to agents as tools of the Model Context Protocol, over stdio or HTTP.

    \b
        vlora mcp --index street.sqlite --pictures photos
        vlora mcp --http-port 8001

    The tools list cameras, ask about what a camera sees now (an admin token in VLORA_TOKEN is needed if the server
    requires tokens), ask about a picture, and search recordings.
    """
    server = make_server(client, index, pictures)
    with client:
        if http_port is None:
            server.run("stdio")
        else:
            click.echo(f"ready: http://127.0.0.1:{http_port}/mcp", err=True)
            server.run("streamable-http", port=http_port)
