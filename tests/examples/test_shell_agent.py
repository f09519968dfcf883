"""The agents of the examples: they are evaluated as they stand; docs/guides/agents.md has what they learn."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from verifiers.cli.evaluate import main
from verifiers.testing import FakeOpenAIServer

AGENTS = Path(__file__).parents[2] / "examples" / "agents"


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="needs curl and jq")
def test_the_shell_agent_prints_the_policys_answer_without_tags(tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> str:
        word = re.sub(".* ", "", body["messages"][-1]["content"])
        return f"<answer>{word[::-1]}</answer>"

    with FakeOpenAIServer(answer) as server:
        arguments = [str(AGENTS / "shell_agent.py"), "-m", "fake", "-b", server.url, "-n", "3", "-r", "1"]
        assert main([*arguments, "--output-dir", str(tmp_path)]) == 0
    [path] = tmp_path.rglob("results.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["outcome"], row["reward"]) for row in rows] == [("completed", 1.0)] * 3
