"""`python -m verifiers.testing`: a fake endpoint in a shell that says that it is fake."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from verifiers.testing import FakeOpenAIServer
from verifiers.testing.__main__ import _script, main


@contextmanager
def serving(arguments: Sequence[str]) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the process; give it and the URL that its first line names."""
    command = [sys.executable, "-u", "-m", "verifiers.testing", "--port", "0", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert "no model" in line
        url = re.search(r"http://127\.0\.0\.1:\d+/v1", line)
        assert url is not None
        yield process, url[0]
    finally:
        process.kill()
        process.communicate()


def ask(url: str, content: str = "hello") -> Any:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": content}]}).encode()
    request = urllib.request.Request(f"{url}/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]


def test_it_answers_with_a_text_or_a_script_and_ends_by_either_signal(tmp_path: Path) -> None:
    script = tmp_path / "answers.json"
    script.write_text('["ok"]')
    with serving(["--answer", "forty-two"]) as (process, url):
        assert [ask(url)["content"], ask(url)["content"]] == ["forty-two", "forty-two"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    with serving(["--script", str(script)]) as (process, url):
        assert ask(url)["content"] == "ok"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130


def test_a_function_is_given_each_request(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("def answer(request):\n    return request['messages'][-1]['content'][::-1]\n")
    with FakeOpenAIServer(_script(script)) as server:
        assert ask(server.url, "abc")["content"] == "cba"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.json", None, "there is no script"),
        ("bad.json", "[", "is not valid JSON"),
        ("empty.json", "[]", "must be a list of texts or messages"),
        ("numbers.json", "[1]", "must be a list of texts or messages"),
        ("text.txt", "yes", "neither a *.json nor a *.py"),
        ("broken.py", "1 / 0", "failed: ZeroDivisionError"),
        ("other.py", "answer = 3", "has no function answer(request)"),
    ],
)
def test_a_script_that_cannot_be_one_is_one_sentence_and_exit_code_2(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / name
    if text is not None:
        script.write_text(text)
    assert main(["--script", str(script), "--port", "0"]) == 2
    (sentence,) = capsys.readouterr().err.strip().splitlines()
    assert sentence.startswith("python -m verifiers.testing: the") or "there is no script" in sentence
    assert message in sentence


def test_a_port_that_is_taken_is_one_sentence_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    assert f"cannot listen on port {port}" in capsys.readouterr().err
