"""This project's side: the whole `vf-eval` command, from loading the environment to metadata.json and report.html."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import side

import verifiers as vf
from verifiers.cli.evaluate import main as vf_eval


def load_environment(rows: int = 1) -> vf.Environment:
    """Return the task, as any environment package gives it."""
    from datasets import Dataset

    def correct(completion: vf.Messages, answer: str) -> float:
        return float(answer in completion[-1]["content"])

    questions = [side.question(index) for index in range(rows)]
    answers = [side.answer(index) for index in range(rows)]
    dataset = Dataset.from_dict({"question": questions, "answer": answers})
    return vf.SingleTurnEnv(eval_dataset=dataset, rubric=vf.Rubric(funcs=[correct]))


def evaluate(url: str, rollouts: int, in_flight: int, scratch: Path) -> float:
    """Run the command once."""
    flags = ["-m", side.MODEL, "-b", url, "-n", str(rollouts), "-r", "1", "-c", str(in_flight), "--json"]
    flags += ["-a", json.dumps({"rows": rollouts}), "--output-dir", str(scratch)]
    code = vf_eval([Path(__file__).stem, *flags])
    if code != 0:
        raise SystemExit(f"vf-eval ended with {code}")
    metadata = json.loads(next(scratch.rglob("metadata.json")).read_text())
    return metadata["summary"]["rewards"]["reward"]["mean"]


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    side.measure(evaluate)
