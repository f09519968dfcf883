"""OpenEnv's own client plays an environment that `vf-serve-env` serves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from client_world import OPENENV

ENVIRONMENT = """
import verifiers as vf


def right(completion, answer):
    return float(completion[-1]["content"] == answer)


def load_environment(most=3):
    rows = [{"question": f"{n}?", "answer": str(n)} for n in range(most)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric([right]))
"""
PLAYER = """
import json, sys
from openenv.core import GenericEnvClient

played = []
with GenericEnvClient(base_url=sys.argv[1]).sync() as env:
    for task in range(3):
        first = env.reset(task_id=task)
        try:
            env.step({"text": "1"})
        except RuntimeError as error:
            refused = str(error)
        last = env.step({"message": "1"})
        played.append([first.observation["text"], first.done, last.reward, last.done, env.state()["task_id"]])
print(json.dumps([played, refused]))
"""


@pytest.mark.slow
def test_its_client_plays_the_tasks_of_an_environment(tmp_path: Path) -> None:
    if not (OPENENV / "python").exists():
        pytest.skip("the clients are not installed; run: make test-clients")
    (tmp_path / "three_digits.py").write_text(ENVIRONMENT)
    (tmp_path / "player.py").write_text(PLAYER)
    command = [sys.executable, "-m", "verifiers.cli.main", "serve-env", "three_digits.py", "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            assert line.startswith("3 tasks of three_digits.py as OpenEnv at http://127.0.0.1:")
            asked = [str(OPENENV / "python"), "player.py", line.split()[-1]]
            told = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, timeout=100)
            assert told.returncode == 0, told.stderr
            played, refused = json.loads(told.stdout.splitlines()[-1])
            assert played == [["0?", False, 0.0, True, 0], ["1?", False, 1.0, True, 1], ["2?", False, 0.0, True, 2]]
            assert "the field 'text'" in refused
            server.send_signal(signal.SIGINT)
            assert server.wait(20) == 130
        finally:
            server.kill()
