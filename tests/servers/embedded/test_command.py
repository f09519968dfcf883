"""The command: one line that a parent can parse, sentences for what is wrong, and a prompt end."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from verifiers_embedded.cli import main

from verifiers.server_process import process_lives

COMMAND = ("verifiers_embedded", "--threads", "1")


def call(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=100) as response:
        return json.load(response)


def test_it_says_where_it_listens_serves_and_ends_on_sigterm(run_command: Any, model_dir: Path) -> None:
    def ask(url: str) -> tuple[str, float]:
        messages = [{"role": "user", "content": "hi"}]
        answer = call(url + "/v1/chat/completions", {"model": "policy", "messages": messages})
        assert answer["usage"]["completion_tokens"] > 0
        call(url + "/pause?mode=keep", {})
        return url, time.monotonic()

    ended = run_command(main, "--model", str(model_dir), "--served-model-name", "policy", ask=ask)
    url, signalled_at = ended.answer
    assert time.monotonic() - signalled_at < 20
    assert (ended.code, ended.err) == (0, "")
    assert ended.out.endswith(f" listening on {url}\n")
    for part in ("policy", "parameters", "cpu", "float32", "64 slots", "KV cache at most 8.0 MiB"):
        assert part in ended.out


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(fcntl, "F_SETLEASE"), reason="only Linux has leases, which stand for a hanging mount")
def test_a_reload_that_hangs_stops_neither_answers_nor_the_end(
    spawn: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = spawn(*COMMAND, "--model", str(model_dir), "--served-model-name", "policy")
    url = process.stdout.readline().split()[-1]
    shutil.copy(model_dir / "model.safetensors", tmp_path)
    # every open of the file waits for its lease to end, as on a mount whose server is gone; the holder gets a signal
    opened = threading.Event()
    before = signal.signal(signal.SIGIO, lambda *_: opened.set())
    leased = os.open(tmp_path / "model.safetensors", os.O_RDWR)
    try:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        body = json.dumps({"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path)}})
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as asking:
            head = "POST /collective_rpc HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            asking.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            assert opened.wait(60)
            answer = call(url + "/v1/completions", {"model": "policy", "prompt": "hi"})
            assert answer["usage"]["completion_tokens"] > 0
            process.terminate()
            assert process.wait(timeout=30) == 0
    finally:
        os.close(leased)
        signal.signal(signal.SIGIO, before)


def test_ctrl_c_ends_the_command_with_130(run_command: Any, model_dir: Path) -> None:
    ended = run_command(main, "--model", str(model_dir), number=signal.SIGINT)
    assert (ended.code, ended.err) == (130, "")


@pytest.mark.slow
def test_no_orphan_survives_its_parent(spawn: Any, model_dir: Path) -> None:
    parent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process = spawn(*COMMAND, "--model", str(model_dir), "--parent-pid", str(parent.pid))
    process.stdout.readline()
    assert process.poll() is None
    parent.kill()
    # Not waited for yet: a zombie is as dead as a process that is gone.
    assert process.wait(timeout=30) == 0
    parent.communicate()
    assert not process_lives(parent.pid)


def refuse(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    before = signal.getsignal(signal.SIGTERM)
    try:
        code = main(arguments)
    finally:
        signal.signal(signal.SIGTERM, before)
    output = capsys.readouterr()
    assert output.out == ""
    return code, output.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--model", "/nowhere/at/all"), "'/nowhere/at/all' is not a directory"),
        (("--model", "/"), "config.json"),
        (("--host", "no.such.host.invalid"), "no.such.host.invalid"),
        (("--port", "70000"), "70000"),
        (("--max-model-len", "100000"), "100000"),
        (("--cuda-graphs",), "--cuda-graphs needs a model on a GPU"),
    ],
)
def test_a_choice_that_cannot_be_is_one_sentence(
    capsys: pytest.CaptureFixture[str], model_dir: Path, arguments: tuple[str, ...], words: str
) -> None:
    code, message = refuse(capsys, "--model", str(model_dir), "--port", "0", "--device", "cpu", *arguments)
    assert (code, message.count("\n"), words in message) == (2, 1, True)


def test_a_model_without_some_of_its_weights_is_not_served(
    capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path
) -> None:
    shutil.copytree(model_dir, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    code, message = refuse(capsys, "--model", str(tmp_path / "model"), "--device", "cpu", "--port", "0")
    assert code == 1
    assert re.search(r"lacks model\.layers\.0\.mlp\.up_proj\.weight, .* saved whole", message)


def test_a_model_is_served_by_its_name_on_the_hub(
    run_command: Any, capsys: pytest.CaptureFixture[str], model_dir: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    from huggingface_hub import _snapshot_download

    cached = tmp_path / "models--someone--tiny-model"
    shutil.copytree(model_dir, cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    # read when the library was imported
    monkeypatch.setattr(_snapshot_download.constants, "HF_HUB_CACHE", str(tmp_path))
    ended = run_command(main, "--model", "someone/tiny-model", ask=lambda url: call(url + "/v1/models"))
    assert ended.code == 0
    assert ended.out.startswith("vf-serve: someone/tiny-model, ")
    assert ended.answer["data"][0]["id"] == "someone/tiny-model"
    code, message = refuse(capsys, "--model", "someone/other-model", "--port", "0")
    assert (code, message.count("\n"), "'someone/other-model'" in message) == (1, 1, True)


def test_a_port_in_use_is_one_sentence(capsys: pytest.CaptureFixture[str], model_dir: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, message = refuse(capsys, "--model", str(model_dir), "--port", port)
    assert (code, message.count("\n")) == (2, 1)
    assert port in message
    assert "--port 0" in message


def test_binding_to_every_address_says_what_that_exposes(run_command: Any, model_dir: Path) -> None:
    ended = run_command(main, "--model", str(model_dir), "--host", "0.0.0.0")
    assert (ended.code, "0.0.0.0" in ended.out) == (0, True)
    assert ended.err.count("\n") == 1
    assert "replace its weights" in ended.err


def test_the_command_knows_its_arguments_without_loading_torch() -> None:
    code = "import sys; import verifiers_embedded.cli as cli; cli.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
