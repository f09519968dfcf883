"""Commands work where a standard stream is closed, as cron and some service managers start them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"], ids=["stdin", "stdout", "stderr"])
def test_an_evaluation_stores_its_rows_where_a_standard_stream_is_closed(closed: str, tmp_path: Path) -> None:
    (tmp_path / "one_env.py").write_text(
        "import verifiers as vf\n"
        "def load_environment():\n"
        "    rows = [{'question': '?', 'answer': '4'}] * 2\n"
        "    return vf.SingleTurnEnv(eval_dataset=rows, rubric=vf.Rubric([lambda completion: 1.0]))\n"
    )
    command = f"{sys.executable} -m verifiers.cli.evaluate one_env.py -m fake -n 2 -r 1 --output-dir out {closed}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done
    (results,) = tmp_path.glob("out/*/*/results.jsonl")
    assert [json.loads(line)["reward"] for line in results.read_text().splitlines()] == [1.0, 1.0]
