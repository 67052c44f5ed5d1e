"""Ask the base model and an adapter about one picture over the OpenAI-compatible HTTP API.

    vlora serve --adapters out/adapters --http-port 8000
    pip install openai
    python examples/ask_over_http.py photo.png "What is shown?" signs

The adapter's name is the `model` of a request. Without an adapter only the base model answers.
"""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any


def message(picture: Path, question: str) -> dict[str, Any]:
    """A user message with a PNG or JPEG picture as a data URL."""
    kind = "jpeg" if picture.suffix.lower() in (".jpg", ".jpeg") else "png"
    data = base64.b64encode(picture.read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{data}"}}
    return {"role": "user", "content": [{"type": "text", "text": question}, image]}


def ask(client: Any, picture: Path, question: str, adapters: list[str]) -> dict[str, str]:
    """The answers of the base model and of each adapter, by model name."""
    base_model = client.models.list().data[0].id
    answers = {}
    for model in (base_model, *adapters):
        completion = client.chat.completions.create(model=model, messages=[message(picture, question)], max_tokens=32)
        answers[model] = completion.choices[0].message.content
    return answers


if __name__ == "__main__":
    from openai import OpenAI

    if len(sys.argv) < 3:
        sys.exit("usage: ask_over_http.py PICTURE QUESTION [ADAPTER ...]")
    server = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    for name, text in ask(server, Path(sys.argv[1]), sys.argv[2], sys.argv[3:]).items():
        print(f"{name}: {text}")
