"""Fuzzing of the HTTP API: requests generated from its OpenAPI document, and broken images. No response is a 500."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from PIL import Image
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.result import Ok

from fusion.embedded import checkpoint_path
from tests.example_counts import scaled
from tests.server.api import Api, image_part, running_api
from tests.server.running import png
from tests.server.test_image_decoding import bomb
from vlora.errors import BadRequest
from vlora.models import InputProcessor

SETTINGS = settings(
    max_examples=scaled(8),
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder = str(tmp_path_factory.mktemp("pictures"))
    with running_api(adapters={"cam": {"night": 1}}, image_hosts=("*",), image_folder=folder) as made:
        yield made
        assert made.idle() and made.chat("say:alive")[1]["choices"][0]["message"]["content"] == "alive"


@pytest.mark.slow
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_no_request_of_the_openapi_document_is_answered_with_500(api: Api, mode: GenerationMode) -> None:
    document = schemathesis.openapi.from_url(f"{api.url}/openapi.json")
    results = list(document.get_all_operations())
    operations = [result.ok() for result in results if isinstance(result, Ok)]
    assert len(operations) == len(results) >= 12
    for operation in operations:
        if mode.is_negative and not operation.body:
            continue  # names in paths may be anything

        @given(case=operation.as_strategy(generation_mode=mode))
        @SETTINGS
        def send(case: Any) -> None:
            case.call_and_validate(checks=(not_a_server_error,), timeout=10)

        send()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"model": "base", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"model": "\\ud800", "messages": [{"role": "user", "content": "say:x"}]}',
        b'{"model": "base", "messages": [{"role": "user", "content": "say:x"}], "\\ud800": 1}',
        b'{"model": "base", "messages": [{"role": "user", "content": "say:x"}], "temperature": NaN}',
        b'{"model": "base", "messages": [{"role": "user", "content": "say:x"}], "temperature": 1e999}',
        b'{"model": "base", "messages": [{"role": "user", "content": "say:x"}], "seed": 1' + b"0" * 5000 + b"}",
        b'{"model": "base", "messages": [{"role": "user", "content": "say:x"}], "max_tokens": 1' + b"0" * 60 + b"}",
        b'{"model": "base", "messages": [{"role": "user", "content": "say:x"}], "stop": [""]}',
        b'{"model": "base", "messages": [{"role": "user", "content": "say:x\\u0000"}]}',
    ],
    ids=lambda body: body[-40:].decode(errors="replace"),
)
def test_bodies_outside_the_document(api: Api, body: bytes) -> None:
    status, answer = api.call("POST", "/v1/chat/completions", raw=body)
    assert 400 <= status < 500 and answer["error"]["message"], answer


def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(Image.new("RGB", (40, 20), (250, 250, 250)), "JPEG", exif=exif)


BRIGHT, DARK = Image.new("RGB", (20, 20), (250,) * 3), Image.new("RGB", (20, 20), (5,) * 3)
PICTURES: dict[str, tuple[bytes, int, str]] = {
    "truncated": (saved(Image.effect_noise((64, 64), 50), "PNG")[:2000], 400, "bad_image"),
    "bomb": (bomb(20_000, 20_000), 413, "too_large"),
    "bomb of one line": (bomb(2**31 - 1, 1), 413, "too_large"),
    "0 x 0": (bomb(0, 0), 400, "bad_image"),
    "no picture": (b"hello", 400, "bad_image"),
    "animated": (saved(BRIGHT, "GIF", save_all=True, append_images=[DARK] * 3), 200, "bright"),
    "cmyk": (saved(Image.new("CMYK", (20, 20), (0, 0, 0, 5)), "JPEG"), 200, "bright"),
    "turned by exif": (turned(), 200, "bright"),
    "palette with transparency": (saved(BRIGHT.convert("P"), "PNG", transparency=0), 200, "bright"),
    "sixteen bits": (saved(Image.new("I;16", (20, 20), 20 * 256), "PNG"), 200, "dark"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_random_images_are_decoded_or_refused(api: Api, name: str) -> None:
    data, status, outcome = PICTURES[name]
    url = image_part(data)["image_url"]["url"]
    got, answer = api.call("POST", "/v1/heads/cam/night", {"images": [url]})
    assert (got, answer["label"] if got == 200 else answer["error"]["code"]) == (status, outcome), answer


def test_images_with_flipped_bytes_are_decoded_or_refused(api: Api) -> None:
    random.seed(0)
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "TIFF", "BMP"):
        whole = png(size=(24, 24), kind=kind)
        for _ in range(12):
            data = bytearray(whole)
            for _ in range(random.randint(1, 6)):
                data[random.randrange(len(data))] = random.randrange(256)
            url = image_part(bytes(data))["image_url"]["url"]
            status, answer = api.call("POST", "/v1/heads/cam/night", {"images": [url]})
            assert status in (200, 400, 413), (kind, bytes(data), answer)


@pytest.fixture(scope="module")
def processor() -> InputProcessor:
    return InputProcessor.from_pretrained(str(checkpoint_path()))


@given(st.text(max_size=60), st.integers(0, 2))
@settings(max_examples=scaled(60))
def test_any_text_is_tokenized_or_refused(processor: InputProcessor, text: str, num_images: int) -> None:
    images = [Image.new("RGB", (20, 20))] * num_images
    try:
        encoded = processor.encode(processor.chat(text, num_images), images)
    except BadRequest as error:
        assert "image markers" in str(error)
        return
    assert len(encoded.vision) == num_images
    assert all(processor.token_text(token) for token in encoded.prompt_ids)
    json.dumps(processor.decode(encoded.prompt_ids))
