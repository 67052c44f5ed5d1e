"""`vlora base serve`: its errors, and one run."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Vlora
from tests.split.running import tiny
from tests.split.test_faults import base_process
from vlora.split import connect
from vlora.split.frames import Direction


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--bind", "0.0.0.0:0"), "without authentication a base model is served on loopback only"),
        (("--bind", "nowhere"), "write HOST:PORT or unix:PATH"),
        (("--shard", "3/2"), "--shard is '3/2'; write I/N"),
        (("--tls-cert", "a.pem"), "tls_cert and tls_key must be set together"),
        (("--device", "abacus"), "use cpu, cuda or cuda:N"),
        (("--token-file", "/nowhere"), "cannot read the token file"),
        (("/nowhere",), "MODEL is '/nowhere'; there is no such folder"),
    ],
)
def test_a_wrong_setting_is_one_line(vlora_command: Vlora, arguments: tuple[str, ...], reason: str) -> None:
    if not any(each.startswith("--bind") for each in arguments):
        arguments = (*arguments, "--bind", "127.0.0.1:0")
    code, out, err = vlora_command("base", "serve", *arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and reason in err and err.count("\n") == 1


@pytest.mark.slow
def test_it_serves_until_it_is_terminated(tmp_path: Path) -> None:
    model = tiny("gpt2")
    model.save_pretrained(tmp_path / "text-model")
    address = f"unix:{tmp_path}/base.sock"
    with base_process(tmp_path / "text-model", address) as process:
        with connect(address) as base:
            base.wrap(tiny("gpt2"))
            x = torch.randn(3, 64)
            (y,) = base.calls.call(Direction.FORWARD, 0, 1, [x])
            torch.testing.assert_close(y, model.transformer.h[0].attn.c_attn(x))
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 130
    assert not (tmp_path / "base.sock").exists()


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("nowhere", "address 'nowhere' is not valid; write HOST:PORT or unix:PATH"),
        ("0.0.0.0:4711", "without authentication a base model is served on loopback only"),
        ("unix:a.sock --replicas 2", "--serve-base unix:a.sock needs --replicas 1 (now 2): one engine listens"),
        ("unix:a.sock --switching in_place", "serve_base needs W0 in memory while an adapter is merged"),
        ("unix:a.sock --quantize int8", "quantize none, not int8"),
        ("unix:a.sock --tensor-parallel 2", "tensor_parallel 1, not 2"),
    ],
)
def test_a_server_that_cannot_serve_its_base_is_refused(vlora_command: Vlora, arguments: str, reason: str) -> None:
    code, out, err = vlora_command("serve", "--rpyc-port", "0", "--serve-base", *arguments.split())
    assert (code, out) == (2, "") and err.startswith("error: ") and reason in err and err.count("\n") == 1
