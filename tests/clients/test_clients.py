"""Other people's clients get from the server what they expect of OpenAI's."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from client_world import KEY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.mark.parametrize("name", ["openai_client", "litellm_client", "inspect_client"])
def test_a_client_runs_its_course(run: Any, scripts: Path, name: str) -> None:
    assert run("python", str(scripts / f"{name}.py")).endswith("ok\n")


def test_curl_gets_an_answer_and_a_stream(curl: str, server: str) -> None:
    body = {"model": "taught", "messages": [{"role": "user", "content": "What is 2 + 2?"}], "temperature": 0}

    def post(fields: dict[str, Any], *options: str) -> str:
        command = [curl, "--silent", "--show-error", *options, f"{server}/v1/chat/completions"]
        command += ["-H", "Content-Type: application/json", "-d", json.dumps({**body, **fields})]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout

    key = ("-H", f"Authorization: Bearer {KEY}")
    assert json.loads(post({}, *key))["choices"][0]["message"]["content"] == "It is 4."
    lines = [line for line in post({"stream": True}, "--no-buffer", *key).splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    said = [json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "") for line in lines[:-1]]
    assert "".join(said) == "It is 4."
    assert json.loads(post({}))["error"]["code"] == "invalid_api_key"


def test_no_request_that_schemathesis_thinks_of_breaks_the_server_or_its_description(
    run: Any, scripts: Path, server: str
) -> None:
    """Bodies right and wrong, for every route: no status 5xx, each answer as described, each wrong one refused."""
    command = ["st", "run", f"{server}/openapi.json", "--phases", "examples,coverage,fuzzing", "--max-examples", "6"]
    command += ["--generation-deterministic", "--no-shrink", "--request-timeout", "20", "--no-color"]
    # what fits the schema may still be too long for the context, or name weights that are not there
    command += ["--exclude-checks", "positive_data_acceptance", "-H", f"Authorization: Bearer {KEY}"]
    output = run(*command, SCHEMATHESIS_HOOKS="schemathesis_hooks", PYTHONPATH=str(scripts))
    passed = re.search(r"(\d+) generated, (\d+) passed", output)
    assert passed, output
    assert passed[1] == passed[2]
    assert int(passed[2]) > 1000
