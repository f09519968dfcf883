"""The two faults for a side of `benchmarks/trl.py`: kill -9 at half time, and 5 % of the grades failing.

A grade fails where its reward would be handed over: ours by an exception of the reward function, TRL's by None, as
its documentation asks for. An exception of a reward function, which is what a broken grader gives by itself, is run
once more on its own: `exit_code` is how that run ended.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

from grades import read_grades, reward_bias
from killing import Attempt, kill_and_resume, newest_of, passive_environ

__all__ = ["FAIL_SHARE", "measure_faults"]

FAIL_SHARE = 0.05
GROUP = 16


def measure_faults(
    script: Path, asked: dict[str, Any], threads: int, directory: Path, *, raises: bool
) -> list[dict[str, Any]]:
    """Run a side with each fault; print a line each, and return them.

    Args:
        script: of the side.
        asked: of it, but for `output_dir`; with `max_steps` and `save_steps`.
        threads: OpenMP threads.
        directory: of the runs; what is there is removed.
        raises: also run a grader that raises.
    """
    side = {"side": script.stem, "seed": asked["seed"]}

    def attempt(name: str, **more: Any) -> Attempt:
        out = directory / f"{script.stem}-{name}"
        shutil.rmtree(out, ignore_errors=True)
        given = {**asked, "output_dir": str(out), "target": math.inf, "threads": threads, **more}
        command = [sys.executable, str(script), json.dumps(given)]
        return Attempt(command, out, passive_environ(threads), lambda: newest_of(out / "lines", step_of))

    steps = asked["max_steps"]
    whole, killed = (attempt(name, fail_share=0.0) for name in ("whole", "killed"))
    rows = [{**side, "fault": "kill -9", **kill_and_resume(whole, killed, steps=steps, group=GROUP)}]
    print(json.dumps(rows[-1]), flush=True)
    failing = attempt("failing", fail_share=FAIL_SHARE, save_steps=0)
    failing.run()
    lines = [
        json.loads(line) for line in (failing.directory / "lines").read_text().splitlines() if line.startswith("{")
    ]
    logged = [line["reward"] for line in lines]
    bias = reward_bias(logged, read_grades(failing.directory / "grades.jsonl"))
    rows.append({**side, "fault": "5 % of grades fail", **bias})
    print(json.dumps(rows[-1]), flush=True)
    if raises:
        broken = attempt("raises", fail_share=FAIL_SHARE, save_steps=0, failing="raises")
        code = broken.ends_with()
        reached = broken.newest_step()
        rows.append({**side, "fault": "a grader that raises", "exit_code": code, "steps": reached})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def step_of(line: str) -> int | None:
    """Return the step of a line that a side printed; None for any other line."""
    if not (line.startswith("{") and line.endswith("}")):
        return None
    return int(json.loads(line)["step"])
