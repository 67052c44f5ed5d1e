"""Images by URL: only from sources that the operator allows, within limits, for any response of the other side."""

from __future__ import annotations

import asyncio
import base64
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from tests.processes import PATIENCE_S
from tests.server.running import png
from vlora.config import ServerConfig
from vlora.errors import BadConfig, BadImage, BadRequest, TooLarge, VLoraError
from vlora.server.media import image_sources
from vlora.server.media.image_decoding import RawImage
from vlora.server.media.image_sources import ImageSources

PICTURE = png()
LOCAL = ("127.0.0.1",)
CONTENT = bytes(range(247, 256)) + b"\0"
BASE64 = base64.b64encode(CONTENT).decode()  # with + and / and padding


class Site(NamedTuple):
    port: int
    paths: list[str]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """A web site with a response for each path."""
    paths: list[str] = []
    over = threading.Event()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            assert self.headers["Host"].endswith(f":{port}") and "Authorization" not in self.headers
            match self.path.split("/")[1:]:
                case ["picture"]:
                    self.answer(200, PICTURE)
                case ["text"]:
                    self.answer(200, b"<html>", kind="text/html")
                case ["large"]:
                    self.answer(200, b"x" * 2000)
                case ["endless"]:
                    self.answer(200, b"x" * 2000, length=None)
                case ["missing"]:
                    self.answer(404, b"")
                case ["slow"]:
                    over.wait(PATIENCE_S)
                case ["round", number]:
                    self.answer(302, b"", location=f"/round/{int(number) + 1}" if int(number) < 3 else "/picture")
                case ["forever"]:
                    self.answer(302, b"", location="/forever")
                case ["to", *rest]:
                    self.answer(302, b"", location="/".join(rest))

        def answer(
            self, status: int, body: bytes, *, kind: str = "image/png", length: int | None = -1, location: str = ""
        ) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            if length is not None:
                self.send_header("Content-Length", str(len(body)))
            if location:
                self.send_header("Location", location)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield Site(port, paths)
    over.set()
    server.shutdown()
    server.server_close()


def read(*urls: bytes | str, **settings: Any) -> list[bytes | RawImage]:
    async def main() -> list[bytes | RawImage]:
        sources = ImageSources(ServerConfig(max_image_bytes=1000, max_images=3, **settings))
        try:
            return await sources.read(urls)
        finally:
            await sources.close()

    return asyncio.run(main())


def test_allowed_hosts_are_fetched_and_redirects_followed(site: Site) -> None:
    assert read(b"own", site.url("/picture"), site.url("/round/1"), image_hosts=LOCAL) == [b"own", PICTURE, PICTURE]


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("/text", BadImage, "image 1: '127.0.0.1' sent 'text/html'; an image is expected"),
        ("/large", TooLarge, "image 1 has over 1000 bytes"),
        ("/endless", TooLarge, "image 1 has over 1000 bytes"),
        ("/missing", BadImage, "cannot be fetched from '127.0.0.1': status 404"),
        ("/forever", BadImage, "more than 3 redirects"),
        ("/to/file:///etc/passwd", BadRequest, "unsupported URL scheme 'file'"),
        ("/to/http://10.0.0.1/", BadRequest, "does not fetch images from '10.0.0.1'"),
        ("/to/http://localhost/", BadRequest, "does not fetch images from 'localhost'"),
        ("/to///evil.example/x", BadRequest, "does not fetch images from 'evil.example'"),
    ],
)
def test_the_response_of_a_host_is_checked(site: Site, path: str, error: type[VLoraError], message: str) -> None:
    with pytest.raises(error, match=message):
        read(site.url(path), image_hosts=LOCAL)


PRIVATE_HOSTS = (
    *("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0.0.0.0", "[::1]", "[::]", "[::ffff:127.0.0.1]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "10.1.2.3", "192.168.0.1", "172.16.9.9", "169.254.169.254"),
    *("100.64.0.1", "[fe80::1]", "[fd00::1]", "224.0.0.1", "[ff02::1]"),
)


@pytest.mark.parametrize("host", PRIVATE_HOSTS)
def test_public_hosts_only_refuses_every_form_of_a_private_address(site: Site, host: str) -> None:
    num_paths = len(site.paths)
    with pytest.raises((BadRequest, BadImage), match=r"is not a public address|cannot resolve host|is invalid"):
        read(site.url("/picture", host), image_hosts=("*",))
    assert len(site.paths) == num_paths


@pytest.mark.parametrize("target", ["http://10.0.0.1/", "http://localhost/picture", "//evil/x"])
def test_public_hosts_only_refuses_redirects_to_private_addresses(
    site: Site, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    real = asyncio.BaseEventLoop.getaddrinfo

    async def getaddrinfo(self: Any, host: str, port: int, **options: Any) -> Any:
        return await real(self, "127.0.0.1" if host == "evil" else host, port, **options)

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    num_paths = len(site.paths)
    with pytest.raises(BadRequest, match="is not a public address"):
        read(site.url(f"/to/{target}"), image_hosts=("*", *LOCAL))
    assert len(site.paths) == num_paths + 1, "only the redirect itself is fetched, not its target"


def test_the_checked_address_is_used_for_the_connection(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that resolves first to a public address and later to a private one is resolved only once."""
    requested: list[str] = []

    async def getaddrinfo(self: Any, host: str, port: int, **_: Any) -> list[Any]:
        requested.append(host)
        return [(2, 1, 6, "", ("127.0.0.1", port))]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    with pytest.raises(BadRequest, match=r"'rebinding\.example' is not a public address"):
        read(site.url("/picture", "rebinding.example"), image_hosts=("*",))
    assert requested == ["rebinding.example"]
    assert read(site.url("/picture", "pictures.example"), image_hosts=("pictures.example",)) == [PICTURE]
    assert requested[1:2] == ["pictures.example"] and set(requested[2:]) <= {"127.0.0.1"}


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://user:secret@127.0.0.1/x?key=secret", "a user name or password"),
        ("http://", "image 1: the URL has no host"),
        ("http://[::1", "the URL is invalid"),
        ("http://127.0.0.1:99999/", "the URL is invalid"),
        ("http://\x00/", "the URL is invalid"),
        ("ftp://127.0.0.1/x", "unsupported URL"),
        ("picture.png", "unsupported URL"),
        ("", "unsupported URL"),
        ("data:image/png,raw", "invalid data URL"),
        ("data:image/png;base64;charset=utf-8,QUJD", "invalid data URL"),
        ("data:image/png;base64", "invalid data URL"),
    ],
)
def test_invalid_urls_are_refused_and_not_repeated(url: str, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        read(url, image_hosts=LOCAL)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "url",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:image/png;BASE64,{BASE64}",
        f"data:;base64,{BASE64}",  # no media type, and one of no image: the bytes decide
        f"data:text/plain;base64,{BASE64}",
        f"data:image/png;charset=utf-8;base64,{BASE64}",
        f"data:image/png; base64 ,{BASE64}",
        f"data:image/png;base\n64,{BASE64}",
        f" \ndata:image/png;base64,{BASE64}\n",  # the URL parser strips blanks and removes line ends
        "data:image/png;base64," + "\r\n".join(BASE64),
        "data:image/png;base64," + " \t\n\f\r".join(BASE64),
        f"data:image/png;base64,{BASE64.rstrip('=')}",
        f"data:image/png;base64,{BASE64.replace('+', '%2B').replace('/', '%2F').replace('=', '%3d')}",
        f"data:image/png;base64,{BASE64.replace('A', '%41%0A%20')}",
        f"data:image/png;base64,{BASE64[:-3]}P==",  # bits after the last byte are dropped
        f"data:image/png;base64,{BASE64}#fragment",
        "data:image/png," + "".join(f"%{byte:02X}" for byte in CONTENT),
    ],
)
def test_data_urls_are_read_as_browsers_read_them(url: str) -> None:
    """By the data URL processor of the Fetch standard, with the forgiving base64 of the Infra standard."""
    assert read(url) == [CONTENT]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE64.replace("+", "-"), r"it has '-' at index \d+; use \+ and / in place of - and _"),
        (BASE64.rstrip("=") + "=", "it has '=' at index 14; padding is complete or absent"),
        (BASE64 + "====", "'=' at index"),
        ("QQ==QQ==", "'=' at index 2"),
        (BASE64[:5], "5 characters cannot be decoded; it may be truncated"),
        ("QU*D", r"it has '\*' at index 2"),
        ("QUéD", "index 2"),
        ("QU\udc80D", "index 2"),
        ("QU%ZZD", "it has '%' at index 2"),
    ],
)
def test_what_browsers_do_not_decode_is_refused(text: str, message: str) -> None:
    with pytest.raises(BadImage, match=f"image 1 is not base64: .*{message}"):
        read(f"data:image/png;base64,{text}")


def test_nothing_is_fetched_or_read_unless_the_operator_allows_it(site: Site, tmp_path: Path) -> None:
    num_paths = len(site.paths)
    with pytest.raises(BadRequest, match=r"does not fetch images from '127.0.0.1'.* --image-hosts"):
        read(site.url("/picture"))
    with pytest.raises(BadRequest, match=r"does not read files.* --image-folder"):
        read(f"file://{tmp_path}/x.png")
    with pytest.raises(TooLarge, match="has 4 images"):
        read(*[site.url("/picture")] * 4, image_hosts=LOCAL)
    assert len(site.paths) == num_paths


def test_an_unresponsive_host_times_out(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadImage, match=r"cannot be fetched from '127\.0\.0\.1': ConnectError"):
        read("http://127.0.0.1:1/", image_hosts=LOCAL)
    monkeypatch.setattr(image_sources, "FETCH_S", 0.2)
    with pytest.raises(BadImage, match=r"image 1 was not received from '127\.0\.0\.1' within 0\.2 s|Timeout"):
        read(site.url("/slow"), image_hosts=LOCAL)


def test_files_are_read_from_the_allowed_folder_only(tmp_path: Path) -> None:
    folder, outside = tmp_path / "pictures", tmp_path / "secret.png"
    folder.mkdir()
    (folder / "a b.png").write_bytes(PICTURE)
    (folder / "large.png").write_bytes(b"x" * 1001)
    (folder / "inside.png").symlink_to(folder / "a b.png")
    (folder / "link.png").symlink_to(outside)
    (folder / "loop.png").symlink_to(folder / "loop.png")
    outside.write_bytes(PICTURE)
    os.mkfifo(folder / "pipe.png")
    allowed = {"image_folder": str(folder)}
    assert (
        read(f"file://{folder}/a%20b.png", "file:a%20b.png", f"file://localhost{folder}/inside.png", **allowed)
        == [PICTURE] * 3
    )
    with pytest.raises(TooLarge, match="image 1 has over 1000 bytes"):
        read("file:large.png", **allowed)
    for url in (
        f"file://{outside}",
        f"file://{folder}/../secret.png",
        f"file://{folder}/%2e%2e/secret.png",
        "file:../secret.png",
        "file:link.png",
        "file:loop.png",
        "file:pipe.png",
        "file:.",
        "file:none.png",
        "file:a\x00b",
        f"file://elsewhere{folder}/inside.png",
        "file://[broken",
        "file:///dev/zero",
        "file:" + "x" * 5000,
    ):
        with pytest.raises(BadImage, match=r"^image 1: no such file in this server's image folder$"):
            read(url, **allowed)
    with pytest.raises(BadConfig, match="there is no such folder"):
        ServerConfig(image_folder=str(tmp_path / "none"))


NOT_PUBLIC = (
    *("fec0::1", "::7f00:1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::1", "2002:7f00:1::", "5f00::1"),
    *("2002:808:808::", "2001:0:7f00:1::", "4000::1", "::ffff:0:127.0.0.1", "fe80::5efe:7f00:1", "100.64.0.1"),
    *("2606:4700::5efe:7f00:1", "2606:4700::200:5efe:808:808", "192.88.99.1", "192.0.0.8", "192.0.0.9"),
    *("198.18.0.1", "168.63.129.16"),
)
PUBLIC = ("8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8", "2a00:1450:4001:80b::200e")


def test_addresses_that_embed_others_are_not_public() -> None:
    assert [each for each in (*NOT_PUBLIC, *PUBLIC) if image_sources.is_public(each)] == list(PUBLIC)


async def test_a_slow_host_does_not_block_other_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick, *others = hosts = [f"127.0.0.{number}" for number in range(1, 7)]
    sources = ImageSources(ServerConfig(image_hosts=tuple(hosts)))
    requested: list[str] = []

    async def send(client: httpx.AsyncClient, request: httpx.Request, *, stream: bool) -> httpx.Response:
        requested.append(str(request.url))
        await asyncio.sleep(0 if request.url.host == quick else PATIENCE_S)
        return httpx.Response(200, headers={"Content-Type": "image/png"}, stream=httpx.ByteStream(b"x"))

    monkeypatch.setattr(httpx.AsyncClient, "send", send)
    waiting = [asyncio.create_task(sources.read([f"http://{slow}/{each}"])) for each in range(40)]
    await asyncio.sleep(0.05)
    assert len(requested) == 4
    assert await sources.read([f"http://{quick}/a", f"http://{quick}/b"]) == [b"x", b"x"]
    for each in waiting:
        each.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    # All of the 16 slots are free again.
    requested.clear()
    waiting = [asyncio.create_task(sources.read([f"http://{host}/"])) for host in others for _ in range(5)]
    await asyncio.sleep(0.05)
    assert sorted(requested) == sorted(f"http://{host}/" for host in others for _ in range(4))
    for each in waiting:
        each.cancel()
