"""No request that schemathesis thinks of breaks the dataserver or its description."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients" / "bin"
TOKEN = "a-token-of-the-tests"


@pytest.fixture
def dataserver(tmp_path: Path) -> Iterator[str]:
    """The URL of a `vf-dataserver` of three datasets and all kinds of built-in graders."""
    rows = [{"prompt": f"q{i}", "answer": f"{i}", "info": {"schema": {"type": "object"}}} for i in range(16)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    cap = {"use": "length_cap", "gate": True, "max_chars": 100, "zero_at": 200}
    linear = ["exact", "number_only", "json_valid", "category", "reasoning_format", "xml_fields", cap]
    graders = {"exact": linear, "schema": ["json_schema"], "maths": [{"use": "math", "answer_from": "text"}]}
    datasets = {name: {"jsonl": "rows.jsonl", "graders": chosen} for name, chosen in graders.items()}
    stages = [
        {"name": "warm", "until_step": 2, "datasets": ["exact"]},
        {"name": "main", "until_step": 9, "datasets": list(datasets)},
    ]
    config = {"datasets": datasets, "curriculum": {"stages": stages}, "server": {"max_batch": 12}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    command = [sys.executable, "-m", "verifiers_dataserver", str(tmp_path / "config.yaml"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--token-var", "VF_TEST_TOKEN", "--parent-pid", str(os.getpid())],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "VF_TEST_TOKEN": TOKEN},
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "listening on " in line, line
    yield line.rpartition("listening on ")[2].strip()
    process.terminate()
    process.communicate(timeout=15)


def test_no_request_that_schemathesis_thinks_of_breaks_the_dataserver_or_its_description(
    dataserver: str, tmp_path: Path
) -> None:
    """Bodies right and wrong, for every route: no status 5xx, each answer as described, each wrong one refused."""
    if not (CLIENTS / "st").exists():
        pytest.skip("the clients are not installed; run: make test-clients")
    command = [str(CLIENTS / "st"), "run", f"{dataserver}/openapi.json", "--phases", "examples,coverage,fuzzing"]
    command += ["--max-examples", "25", "--generation-deterministic", "--no-shrink", "--request-timeout", "20"]
    # what fits the schema may still name a sample that is not there, or ask for more rows than there are
    command += ["--exclude-checks", "positive_data_acceptance", "-H", f"Authorization: Bearer {TOKEN}", "--no-color"]
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "SCHEMATHESIS_HOOKS": "dataserver_hooks"}
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(Path(__file__).parent / "scripts")},
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-6000:]}"
    passed = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert passed, done.stdout
    assert passed[1] == passed[2]
    assert int(passed[2]) > 500
