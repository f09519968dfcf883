"""No request that schemathesis thinks of breaks the dataserver or its description."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_world import CLIENTS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TOKEN = "a-token-of-the-tests"


ENVIRONMENT = """
import verifiers as vf


def load_environment():
    rows = [{"question": f"q{i}", "answer": str(i)} for i in range(16)]
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[right]))


def right(completion, answer):
    return float(completion[-1]["content"] == answer)
"""


@pytest.fixture
def readable() -> Iterator[Path]:
    """Return a module of graders where the user that sandboxes run as may read it."""
    with tempfile.TemporaryDirectory(prefix="graders-") as directory:
        os.chmod(directory, 0o755)
        (Path(directory) / "fuzzed_graders.py").write_text("def length(text):\n    return len(text)\n")
        yield Path(directory)


@pytest.fixture
def dataserver(tmp_path: Path, readable: Path) -> Iterator[str]:
    """Return the URL of a `vf-dataserver` of datasets and graders of all kinds."""
    rows = [{"prompt": f"q{i}", "answer": f"{i}", "info": {"schema": {"type": "object"}}} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    turns = [{"role": role, "content": "?"} for role in ("system", "user", "assistant", "user")]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps({"prompt": turns, "answer": "a"}) + "\n" for _ in rows))
    (tmp_path / "fuzzed_env.py").write_text(ENVIRONMENT)
    cap = {"use": "length_cap", "gate": True, "max_chars": 100, "zero_at": 200}
    linear = ["exact", "number_only", "json_valid", "category", "reasoning_format", "xml_fields", cap]
    graders = {"exact": linear, "schema": ["json_schema"], "maths": [{"use": "math", "answer_from": "text"}]}
    datasets = {name: {"jsonl": "rows.jsonl", "graders": chosen} for name, chosen in graders.items()}
    datasets["python"] = {"jsonl": "rows.jsonl", "graders": ["mine"]}
    datasets["rubric"] = {"environment": {"id": "fuzzed_env"}}
    datasets["talk"] = {"jsonl": "talk.jsonl", "graders": ["exact"]}
    stages = [
        {"name": "warm", "until_step": 2, "datasets": ["exact"]},
        {"name": "main", "until_step": 9, "datasets": [name for name in datasets if name != "talk"]},
        {"name": "talk", "datasets": ["talk"]},
    ]
    config = {
        "datasets": datasets,
        "curriculum": {"stages": stages},
        "graders": {"mine": {"python": "fuzzed_graders:length", "path": str(readable)}},
        "server": {"max_batch": 12},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "verifiers_dataserver", str(tmp_path / "config.yaml"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--token-var", "VF_TEST_TOKEN", "--parent-pid", str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VF_TEST_TOKEN": TOKEN, "PYTHONPATH": str(tmp_path)},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "listening on " in line, line
    yield line.rpartition("listening on ")[2].strip()
    process.terminate()
    process.communicate(timeout=15)


def fuzz(dataserver: str, directory: Path, hooks: str, *options: str) -> int:
    """Have schemathesis think of requests; how many there were, once all have passed."""
    if not (CLIENTS / "st").exists():
        pytest.skip("the clients are not installed; run: make test-clients")
    # too much at once is refused with a status of its own
    statuses = [400, 401, 404, 405, 406, 413, 415]
    (directory / "schemathesis.toml").write_text(
        f"[checks.negative_data_rejection]\nexpected-statuses = {statuses}\n"
    )
    command = [str(CLIENTS / "st"), "run", f"{dataserver}/openapi.json", "--phases", "examples,coverage,fuzzing"]
    command += ["--generation-deterministic", "--no-shrink", "--request-timeout", "20", "--no-color", *options]
    done = subprocess.run(
        [*command, "-H", f"Authorization: Bearer {TOKEN}"],
        cwd=directory,
        env={
            "HOME": str(directory),
            "PATH": os.environ["PATH"],
            "SCHEMATHESIS_HOOKS": hooks,
            "PYTHONPATH": str(Path(__file__).parent / "scripts"),
        },
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    passed = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert passed, done.stdout
    assert passed[1] == passed[2]
    return int(passed[2])


def test_no_request_that_schemathesis_thinks_of_breaks_the_dataserver_or_its_description(
    dataserver: str, tmp_path: Path
) -> None:
    """Bodies right and wrong, for every route: no status 5xx, each answer as described, each wrong one refused."""
    # what fits the description may still name a sample that is not there, or ask for more rows than there are
    options = ("--max-examples", "150", "--exclude-checks", "positive_data_acceptance")
    assert fuzz(dataserver, tmp_path, "dataserver_hooks", *options) > 500


def test_every_request_that_fits_the_description_and_the_rows_is_accepted(dataserver: str, tmp_path: Path) -> None:
    options = ("--max-examples", "100", "--mode", "positive")
    assert fuzz(dataserver, tmp_path, "dataserver_positive_hooks", *options) > 200
