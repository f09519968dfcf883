"""Two faults of a side of `benchmarks/trl.py`: kill -9 at half time, and 5 % of the grades failing.

A run is killed with all of its processes as soon as half of its steps are logged, and continues by the same command.
Seconds are those of whole processes, so that loading a second time counts.

A grade fails where its reward would be handed over: ours by an exception of the reward function, TRL's by None, as
its documentation asks for. An exception of a reward function, which is what a broken grader gives by itself, is run
once more on its own: `exit_code` is how that run ended.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from grades import read_grades, reward_bias

FAIL_SHARE = 0.05
GROUP = 16
_POLL_S = 0.1


@dataclass(frozen=True)
class Attempt:
    """A run of a script, in a directory for its output, that continues by the same command.

    What the script prints is appended to `lines`, and its errors to `log`; graded rollouts are in `grades.jsonl`.
    """

    script: Path
    asked: dict[str, Any]
    directory: Path

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The steps that were printed."""
        path = self.directory / "lines"
        printed = path.read_text(errors="replace").splitlines() if path.exists() else []
        return [json.loads(line) for line in printed if line.startswith("{") and line.endswith("}")]

    @property
    def newest_step(self) -> int:
        """The newest step that was printed; 0 before the first."""
        return max((int(line["step"]) for line in self.lines), default=0)

    def run(self, *, kill_at: int | None = None) -> tuple[float, int]:
        """Run until the end, or until this step is printed, and kill -9 everything then; return seconds and code."""
        self.directory.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, str(self.script), json.dumps(self.asked)]
        environ = passive_environ(self.asked.get("threads", 1))
        started = time.perf_counter()
        with open(self.directory / "lines", "ab") as lines, open(self.directory / "log", "ab") as log:
            process = subprocess.Popen(command, stdout=lines, stderr=log, env=environ)
            try:
                while process.poll() is None and (kill_at is None or self.newest_step < kill_at):
                    time.sleep(_POLL_S)
            finally:
                kill_all(process.pid)
                code = process.wait()
        return time.perf_counter() - started, code

    def seconds(self, *, kill_at: int | None = None) -> float:
        """Return the seconds of a run; exit where it ended otherwise than it should."""
        seconds, code = self.run(kill_at=kill_at)
        if code != (0 if kill_at is None else -9):
            sys.exit(f"{self.directory}: the run ended with {code}: {(self.directory / 'log').read_text()[-2000:]}")
        return seconds


def kill_all(pid: int) -> None:
    """Kill -9 a process and all that it started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()


def kill_and_resume(whole: Attempt, killed: Attempt, *, steps: int, group: int) -> dict[str, Any]:
    """Return what kill -9 at half of the steps cost, beside a run of the same steps that was left alone.

    Args:
        whole: the run that is left alone.
        killed: the same in another directory.
        steps: optimizer steps of both.
        group: rollouts of a prompt.

    Returns:
        `seconds_lost`: seconds of both parts over those of the whole run. `prompts_again`: groups of rollouts that
        were graded beyond those of the whole run. `prompts_skipped`: prompts of the whole run that the other never
        graded.
    """
    alone = whole.seconds()
    before = killed.seconds(kill_at=max(1, steps // 2))
    reached = killed.newest_step
    after = killed.seconds()
    graded = [read_grades(one.directory / "grades.jsonl") for one in (whole, killed)]
    prompts = [{grade.prompt for grade in grades} for grades in graded]
    return {
        "seconds_lost": round(before + after - alone, 2),
        "seconds_alone": round(alone, 2),
        "killed_at_step": reached,
        "steps": killed.newest_step,
        "prompts_again": round((len(graded[1]) - len(graded[0])) / group, 2),
        "prompts_skipped": len(prompts[0] - prompts[1]),
        "prompts": round(len(graded[0]) / group, 2),
    }


def measure_faults(script: Path, asked: dict[str, Any], directory: Path, *, raises: bool) -> list[dict[str, Any]]:
    """Run a side with each fault; print a line each, and return them.

    Args:
        script: of the side.
        asked: of it, but for `output_dir`; with `threads`, `max_steps` and `save_steps`.
        directory: of the runs; what is there is removed.
        raises: also run a grader that raises.
    """
    side = {"side": script.stem, "seed": asked["seed"]}

    def attempt(name: str, **more: Any) -> Attempt:
        out = directory / f"{script.stem}-{name}"
        shutil.rmtree(out, ignore_errors=True)
        return Attempt(script, {**asked, "output_dir": str(out), "target": math.inf, **more}, out)

    whole, killed = (attempt(name, fail_share=0.0) for name in ("whole", "killed"))
    rows = [{**side, "fault": "kill -9", **kill_and_resume(whole, killed, steps=asked["max_steps"], group=GROUP)}]
    failing = attempt("failing", fail_share=FAIL_SHARE, save_steps=0)
    failing.seconds()
    bias = reward_bias([line["reward"] for line in failing.lines], read_grades(failing.directory / "grades.jsonl"))
    rows.append({**side, "fault": "5 % of grades fail", **bias})
    if raises:
        broken = attempt("raises", fail_share=FAIL_SHARE, save_steps=0, failing="raises")
        _, code = broken.run()
        rows.append({**side, "fault": "a grader that raises", "exit_code": code, "steps": broken.newest_step})
    for row in rows:
        print(json.dumps(row), flush=True)
    return rows


def passive_environ(threads: int) -> dict[str, str]:
    """Return an environment without network, in which idle threads leave the cores to others."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
