"""Ask several adapters about one picture at the same time: the server computes their requests in one batch.

vlora serve --adapters out/adapters
python examples/two_adapters_one_image.py photo.png "what is shown ?" signs digits
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from vlora.client import AsyncClient


async def ask(client: AsyncClient, picture: str, question: str, adapters: Sequence[str]) -> dict[str, str]:
    """The answers by adapter."""
    calls = [client.generate(question, images=[picture], adapter=adapter) for adapter in adapters]
    answers = await asyncio.gather(*calls)
    return {adapter: answer.text for adapter, answer in zip(adapters, answers, strict=True)}


async def main(picture: str, question: str, adapters: Sequence[str]) -> None:
    async with AsyncClient() as client:
        for adapter, text in (await ask(client, picture, question, adapters)).items():
            print(f"{adapter}: {text}")


if __name__ == "__main__":
    if len(sys.argv) < 4:
        sys.exit("usage: two_adapters_one_image.py PICTURE QUESTION ADAPTER [ADAPTER ...]")
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
