"""This project's side: the whole `vf-eval` command, from loading the environment to the summary in metadata.json.

It writes report.html too, which the others have no counterpart of; the time that takes is told apart.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import side

import verifiers as vf
from verifiers.cli import evaluate as command
from verifiers.reports import evaluation

_report_s = _report_cpu_s = 0.0
_write_report = evaluation.write_evaluation_report


def _timed_report(*args: Any, **kwargs: Any) -> Any:
    global _report_s, _report_cpu_s
    started, cpu = time.perf_counter(), side.cpu_s()
    written = _write_report(*args, **kwargs)
    _report_s, _report_cpu_s = time.perf_counter() - started, side.cpu_s() - cpu
    return written


def load_environment(rows: int = 1) -> vf.Environment:
    """Return the task, as any environment package gives it."""
    from datasets import Dataset

    def correct(completion: vf.Messages, answer: str) -> float:
        return float(answer in completion[-1]["content"])

    questions = [side.question(index) for index in range(rows)]
    answers = [side.answer(index) for index in range(rows)]
    dataset = Dataset.from_dict({"question": questions, "answer": answers})
    return vf.SingleTurnEnv(eval_dataset=dataset, rubric=vf.Rubric(funcs=[correct]))


def evaluate(url: str, rollouts: int, in_flight: int, scratch: Path) -> side.Evaluated:
    """Run the command once."""
    flags = ["-m", side.MODEL, "-b", url, "-n", str(rollouts), "-r", "1", "-c", str(in_flight), "--json"]
    flags += ["-a", json.dumps({"rows": rollouts}), "--output-dir", str(scratch)]
    code = command.main([Path(__file__).stem, *flags])
    if code != 0 or _report_s == 0:
        raise SystemExit(f"vf-eval ended with {code}, and its report took {_report_s} s")
    metadata = json.loads(next(scratch.rglob("metadata.json")).read_text())
    return side.Evaluated(metadata["summary"]["rewards"]["reward"]["mean"], _report_s, _report_cpu_s)


if __name__ == "__main__":
    evaluation.write_evaluation_report = _timed_report
    sys.path.insert(0, str(Path(__file__).parent))
    side.measure(evaluate)
