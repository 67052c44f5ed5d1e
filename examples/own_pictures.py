"""From folders of pictures to a served domain, and to a second one next week, without a lost request.

Draws pictures of traffic lights and of shapes, in a folder for each label; replace them by your own. Trains and serves
the domain `lights`, asks it in four ways, then adds the domain `shapes` while requests continue. Prints the seconds of
each step.

    python examples/own_pictures.py work      # an empty folder for pictures, plan, adapters and logs

Needs the extra `fuse`.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from vlora.client import Client

VLORA = (sys.executable, "-m", "vlora.cli")
LABELS = {"lights": ("red", "green"), "shapes": ("circle", "square")}


def plan(domains: Iterable[str], steps: int) -> str:
    text = "base: embedded\nconfidence: null                # so few pictures prove nothing\n"
    text += f"training: {{steps: {steps}, batch_size: 8}}\ndomains:\n"
    for name in domains:
        text += f"  - name: {name}\n    data: {{format: image_folder, path: {name}}}\n"
        text += f"    question: which of the {name} is shown ?\n    threshold: 0.7\n"
    return text


def draw(label: str, rng: np.random.Generator) -> Image.Image:
    """A picture of one label on a noisy ground."""
    picture = Image.fromarray(rng.integers(0, 70, (96, 96, 3)).astype(np.uint8))
    pen, (x, y) = ImageDraw.Draw(picture), rng.integers(4, 48, 2).tolist()
    color = label if label in LABELS["lights"] else tuple(rng.integers(150, 255, 3).tolist())
    (pen.rectangle if label == "square" else pen.ellipse)((x, y, x + 44, y + 44), fill=color)
    return picture


def draw_folders(folder: Path, count: int) -> None:
    rng = np.random.default_rng(0)
    for domain, labels in LABELS.items():
        for label in labels:
            (folder / domain / label).mkdir(parents=True)
            for number in range(count):
                draw(label, rng).save(folder / domain / label / f"{number}.png")


def over_http(url: str, domain: str, picture: Path) -> str:
    """A chat completion as OpenAI's clients send it; without a text the domain's question is asked."""
    image = {"url": "data:image/png;base64," + base64.b64encode(picture.read_bytes()).decode()}
    body = {"model": domain, "messages": [{"role": "user", "content": [{"type": "image_url", "image_url": image}]}]}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as response:
        answer: str = json.load(response)["choices"][0]["message"]["content"]
    return answer


def over_rpyc(client: Client, domain: str, picture: Path) -> str:
    return client.generate("", [picture], domain).text


def as_stream(client: Client, domain: str, picture: Path) -> str:
    """The answer to one frame of a camera."""
    with client.open_stream(adapter=domain, head=domain, drop="none") as stream:
        stream.send(picture)
        stream.end()
        (result,) = stream
    assert result.answer is not None, result.error
    return result.answer.label


def on_the_command_line(address: str, domain: str, picture: Path) -> str:
    command = (*VLORA, "query", str(picture), "--adapter", domain, "--server", address)
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("  ")[0].strip()


def ask_in_every_way(url: str, address: str, domain: str, picture: Path) -> dict[str, str]:
    host, _, port = address.rpartition(":")
    with Client(host, int(port)) as client:
        answers = {
            "HTTP": over_http(url, domain, picture),
            "RPyC": over_rpyc(client, domain, picture),
            "stream": as_stream(client, domain, picture),
        }
    return answers | {"command line": on_the_command_line(address, domain, picture)}


@contextlib.contextmanager
def asking(ask: Callable[[], str]) -> Iterator[list[str]]:
    """Ask without a pause until the block ends; the list has an answer or an error for each request."""
    answers: list[str] = []
    done = threading.Event()

    def repeat() -> None:
        while not done.is_set():
            try:
                answers.append(ask())
            except Exception as error:
                answers.append(repr(error))

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield answers
    finally:
        done.set()
        thread.join()


@contextlib.contextmanager
def timed(what: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    print(f"{time.monotonic() - began:6.1f} s  {what}", flush=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
        return port


def run(folder: Path, *, steps: int, count: int) -> dict[str, dict[str, str]]:
    """The answers of both domains, by the way in which they were asked; raises if a request was lost."""

    def vlora(*arguments: str) -> None:
        with timed(f"vlora {' '.join(arguments)}"), (folder / "log.txt").open("a") as log:
            subprocess.run((*VLORA, *arguments), cwd=folder, check=True, stdout=log, stderr=log)

    url, address = (f"{scheme}127.0.0.1:{free_port()}" for scheme in ("http://", ""))
    with timed("pictures"):
        draw_folders(folder, count)
    (folder / "plan.yaml").write_text(plan(["lights"], steps))
    vlora("fuse", "plan.yaml", "--check")
    vlora("fuse", "plan.yaml", "--out", "out")
    ports = ("--http-port", url.rpartition(":")[2], "--rpyc-port", address.rpartition(":")[2])
    with (folder / "serve.log").open("w") as log:
        server = subprocess.Popen((*VLORA, "serve", "--adapters", "out/adapters", *ports), cwd=folder, stdout=log)
    try:
        vlora("status", "--wait-s", "300", "--server", address)
        red, square = folder / "lights" / "red" / "0.png", folder / "shapes" / "square" / "0.png"
        with timed("lights, asked in four ways"):
            answers = {"lights": ask_in_every_way(url, address, "lights", red)}
        (folder / "plan.yaml").write_text(plan(["lights", "shapes"], steps))
        with asking(lambda: over_http(url, "lights", red)) as meanwhile:
            vlora("fuse", "plan.yaml", "--out", "out", "--resume", "--serve-to", address)
            with timed("shapes, asked in four ways"):
                answers["shapes"] = ask_in_every_way(url, address, "shapes", square)
        lost = [answer for answer in meanwhile if answer not in LABELS["lights"]]
        print(f"{len(meanwhile)} requests about lights meanwhile, {len(lost)} lost")
        if lost:
            raise SystemExit(f"lost: {lost[0]}")
    finally:
        server.terminate()
        server.wait()
    for domain, found in answers.items():
        print(f"{domain}: {', '.join(f'{answer} ({way})' for way, answer in found.items())}")
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60, help="of each training")
    parser.add_argument("--pictures", type=int, default=60, help="of each label")
    args = parser.parse_args()
    args.folder.mkdir(exist_ok=True)
    run(args.folder.absolute(), steps=args.steps, count=args.pictures)


if __name__ == "__main__":
    main()
