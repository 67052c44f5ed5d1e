"""`vlora query`: a text question, or a task head, about one or several images."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vlora.cli.group import cli
from vlora.cli.options import ADAPTER, ANSWER, ANSWER_TOKENS, HEAD, command, flag, given, print_json
from vlora.cli.progress import waiting
from vlora.errors import BadImage, BadRequest, TooLarge
from vlora.types.domain import Way

if TYPE_CHECKING:
    from vlora.client import Answer, Client, HeadResult

_OF_TEXT = ("answer", "max_tokens", "temperature", "stop", "max_ttft_s", "question")  # that do not apply to heads


@command(cli)
@click.argument("images", nargs=-1, required=True, metavar="IMAGE... [QUESTION]")
def query(
    images: tuple[str, ...],
    question: str | None = flag(None, "The question, if it is not the last argument.", "-q"),
    adapter: str | None = ADAPTER,
    head: str | None = HEAD,
    answer: Way | None = ANSWER,
    max_tokens: int = ANSWER_TOKENS,
    temperature: float = flag(0.0, "0 is greedy decoding."),
    stop: tuple[str, ...] = flag((), "End the answer before this text; may be repeated."),
    max_ttft_s: float | None = flag(None, "Maximum time to the first token. Default: no bound."),
    max_latency_s: float | None = flag(None, "Maximum latency of the whole answer. Default: no bound."),
    priority: int = flag(0, "From -10 to 10; a higher priority is scheduled first."),
    *,
    client: Client,
    as_json: bool,
) -> None:
    """Ask a question about one image, or about several together.

    \b
        vlora query photo.png "What is this?" --adapter signs
        vlora query before.png after.png "What has changed?"
        vlora query https://example.org/photo.jpg --adapter signs --head signs

    An image is a file or an http(s) URL, which this command fetches. Without a question, the adapter's own question is
    used, if it has one. A head has a fixed question and answers in one pass.

    A domain's question, in any spelling, is answered by the domain's head or in words, whichever is right more often,
    or as --answer says. The way and its confidence are printed after the answer. Other questions, --temperature and
    --stop are for words.
    """
    if head is not None:
        for name in filter(given, _OF_TEXT):
            option = f"--{name.replace('_', '-')}"
            raise BadRequest(f"{option} has no effect on a task head's answer; leave out {option} or --head")
        if adapter is None:
            raise BadRequest(f"--head is {head!r}; also give its --adapter")
    elif question is None and len(images) > 1 and not _is_picture(images[-1]):
        images, question = images[:-1], images[-1]
    options: dict[str, Any] = {"max_latency_s": max_latency_s, "priority": priority}
    with client, waiting("asking") as begun:
        pictures = [fetch_picture(image) if _is_url(image) else Path(image) for image in images]
        if head is not None:
            assert adapter is not None
            result = client.ask_head(pictures, adapter, head, **options)
            begun()
            print_json(result) if as_json else _print_result(result)
            return
        options |= {"max_tokens": max_tokens, "temperature": temperature, "stop": stop, "max_ttft_s": max_ttft_s}
        if as_json:
            print_json(client.generate(question or "", pictures, adapter, answer=answer, **options))
            return
        with client.stream(question or "", pictures, adapter, answer=answer, **options) as pieces:
            for piece in pieces:
                begun()
                click.echo(piece, nl=False)
        begun()
        assert pieces.answer is not None
        click.echo(_how(pieces.answer))
        if pieces.answer.result is not None:
            _print_boxes(pieces.answer.result)


def _is_url(image: str) -> bool:
    return re.match(r"https?://", image, re.IGNORECASE) is not None


def _how(answer: Answer) -> str:
    """The way and the confidence of an answer about a domain, to print behind it; empty for other answers."""
    if answer.domain is None:
        return ""
    by = "in words" if answer.result is None else f"head {answer.result.head}"
    sure = "" if answer.confidence is None else f"  {answer.confidence:.1%}"
    return f"{sure}  ({by})"


def _is_picture(argument: str) -> bool:
    try:
        return _is_url(argument) or Path(argument).exists()
    except (OSError, ValueError):  # longer than a file name may be, or with a zero byte: a question
        return False


def _print_result(result: HeadResult) -> None:
    """Print the label; for a detection also its boxes, in pixels."""
    click.echo(f"{result.label}  {result.confidence:.1%}")
    _print_boxes(result)


def _print_boxes(result: HeadResult) -> None:
    several = len({box.image for box in result.boxes}) > 1
    for box in result.boxes:
        edges = ", ".join(f"{edge:.0f}" for edge in (box.left, box.top, box.right, box.bottom))
        click.echo(f"  {box.label}  {box.score:.1%}  [{edges}]" + (f"  picture {box.image + 1}" if several else ""))


MAX_BYTES = 64 * 2**20  # above every server's default; the server's own limit applies
TIMEOUT_S = 30.0


def fetch_picture(url: str) -> bytes:
    """Fetch an encoded image, through the proxy of the environment if set (HTTPS_PROXY, NO_PROXY).

    Raises:
        BadImage: the URL cannot be fetched, or does not contain an image.
        TooLarge: it has more than 64 MiB.
    """
    host: str | None = None
    try:
        host = urllib.parse.urlsplit(url).hostname
        request = urllib.request.Request(url, headers={"Accept": "image/*", "User-Agent": "vlora"})
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            kind = response.headers.get_content_type()
            body = bytes(response.read(MAX_BYTES + 1))
    except urllib.error.HTTPError as error:
        raise BadImage(f"the picture cannot be fetched from {host!r}: status {error.code}") from error
    except urllib.error.URLError as error:
        why = error.reason.strerror if isinstance(error.reason, OSError) else error.reason
        raise BadImage(f"the picture cannot be fetched from {host!r}: {why or error.reason}") from error
    except TimeoutError as error:
        raise BadImage(f"the picture cannot be fetched from {host!r}: no answer within {TIMEOUT_S:g} s") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise BadImage(f"the picture cannot be fetched from {url[:100]!r}; check the URL") from error
    if kind.partition("/")[0] in ("text", "audio", "video"):
        raise BadImage(f"{host!r} sent {kind!r}; an image is expected")
    if len(body) > MAX_BYTES:
        raise TooLarge(f"the picture from {host!r} has over {MAX_BYTES} bytes; send a smaller one")
    return body
