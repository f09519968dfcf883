"""The tutorial as it is printed, from an empty directory, with what pip installs from the wheels of this checkout.

Each command and each file of the page, and the gain that it promises.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from clean_environment import COMMAND, CleanEnvironment
from ports import free_port

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)


def wait_for(port: int, server: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120
    while time.monotonic() < until:
        assert server.poll() is None, "the server ended"
        with socket.socket() as caller:
            if caller.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("the server does not listen")


def shapes(text: str) -> list[str]:
    """Return the lines without numbers and spacing, which differ from run to run."""
    return [" ".join(re.sub(r"[-+]?\d[\d.,:]*", "#", line).split()) for line in text.splitlines()]


class Reader:
    """A person who follows the page in an empty directory, with one port for the page's 8000."""

    def __init__(self, directory: Path, clean: CleanEnvironment) -> None:
        self.directory, self.port = directory, free_port()
        self.servers: list[subprocess.Popen[bytes]] = []
        self.outputs: dict[str, str] = {}
        self._last = ""
        self._environment = {**clean.variables, "PYTHONUNBUFFERED": "1", "COLUMNS": "120"}
        self._environment.pop("OMP_NUM_THREADS", None)

    def follow(self, language: str, title: str | None, text: str) -> None:
        """Do what one block asks for."""
        if language == "text":
            # a line that ends in "..." is the beginning of one
            printed = shapes(self._last)
            shown = [(line.removesuffix("..."), line.endswith("...")) for line in shapes(text)]
            missing = [
                line
                for line, is_cut in shown
                if not any(one.startswith(line) if is_cut else one == line for one in printed)
            ]
            assert not missing, f"the page shows {missing}, the command printed\n{self._last}"
            return
        text = text.replace("8000", str(self.port))
        if language != "sh":
            assert title is not None
            (self.directory / title).write_text(text)
        elif title is not None:
            command = f"exec {text.strip()}" + ("" if str(self.port) in text else f" --port {self.port}")
            server = subprocess.Popen(command, shell=True, cwd=self.directory, env=self._environment)
            self.servers.append(server)
            wait_for(self.port, server)
        else:
            for command in text.splitlines():
                self.run(command)

    def stop_servers(self) -> None:
        while self.servers:
            server = self.servers.pop()
            server.send_signal(signal.SIGTERM)
            server.wait(30)

    def run(self, command: str) -> None:
        if command.startswith("vf-train"):
            # the page says so
            self.stop_servers()
        done = subprocess.run(
            command, shell=True, cwd=self.directory, env=self._environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        self._last = self.outputs[command] = done.stdout
        print(f"$ {command}\n{done.stdout}", flush=True)


@pytest.fixture
def reader(tmp_path: Path, dist: Path) -> Iterator[Reader]:
    clean = CleanEnvironment.make(tmp_path / "installed", dist)
    (command,) = [
        command
        for command in COMMAND.findall((PAGE.parent / "install.md").read_text())
        if "[train]" in command and "dist/" in command
    ]
    clean.install(command)
    directory = tmp_path / "empty"
    directory.mkdir()
    reader = Reader(directory, clean)
    yield reader
    reader.stop_servers()


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_tutorial_works_as_printed_and_ends_in_a_model_that_learned(reader: Reader) -> None:
    blocks = BLOCK.findall(PAGE.read_text())
    assert sum(language == "sh" for language, _, _ in blocks) >= 5
    for language, title, text in blocks:
        reader.follow(language, title or None, text)
    compared = next(command for command in reader.outputs if command.startswith("vf-compare"))
    reader.run(f"{compared} --json")
    (comparison,) = json.loads(reader.outputs[f"{compared} --json"])["comparisons"]
    print(comparison)
    assert comparison["verdict"] == "B is better"
    assert comparison["difference"]["low"] > 0.2
    assert comparison["common_prompts"] == 32
    assert (reader.directory / "runs/people/report.html").stat().st_size > 10_000
