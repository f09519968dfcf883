"""kill -9 of a training run at half time, and the same command again: seconds and prompts that it costs.

An attempt is one command in one directory. It is run whole once, and once with every process of it killed as soon as
half of the steps are logged. Both sides' seconds are those of whole processes, so that loading a second time counts.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from grades import read_grades

__all__ = ["Attempt", "kill_all", "kill_and_resume", "newest_of", "passive_environ"]

_POLL_S = 0.1


@dataclass(frozen=True)
class Attempt:
    """A run that continues by the same command.

    Attributes:
        command: starts the run, or resumes it from its newest checkpoint.
        directory: of its output; `grades.jsonl` in it has what was graded, `lines` and `log` what was printed.
        environ: of the processes.
        newest_step: returns the newest step that was logged, 0 before the first.
    """

    command: Sequence[str]
    directory: Path
    environ: Mapping[str, str]
    newest_step: Callable[[], int]

    def run(self, *, kill_at: int | None = None) -> float:
        """Run until the end, or until this step is logged, and kill -9 everything then; return seconds."""
        seconds, code = self._start(kill_at)
        if kill_at is not None and code != -9:
            sys.exit(f"{self.directory}: the run ended with {code} before step {kill_at}: {self._end_of_log()}")
        if kill_at is None and code:
            sys.exit(f"{self.directory}: the run ended with {code}: {self._end_of_log()}")
        return seconds

    def ends_with(self) -> int:
        """Run until the end and return the exit code."""
        return self._start(None)[1]

    def _start(self, kill_at: int | None) -> tuple[float, int]:
        self.directory.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        with open(self.directory / "lines", "ab") as lines, open(self.directory / "log", "ab") as log:
            process = subprocess.Popen(self.command, stdout=lines, stderr=log, env=dict(self.environ))
            try:
                while process.poll() is None:
                    if kill_at is not None and self.newest_step() >= kill_at:
                        break
                    time.sleep(_POLL_S)
            finally:
                kill_all(process.pid)
                code = process.wait()
        return time.perf_counter() - started, code

    def _end_of_log(self) -> str:
        return (self.directory / "log").read_text(errors="replace")[-2000:]


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
    alone = whole.run()
    before = killed.run(kill_at=max(1, steps // 2))
    reached = killed.newest_step()
    after = killed.run()
    graded = [read_grades(one.directory / "grades.jsonl") for one in (whole, killed)]
    prompts = [{grade.prompt for grade in grades} for grades in graded]
    return {
        "seconds_lost": round(before + after - alone, 2),
        "seconds_alone": round(alone, 2),
        "killed_at_step": reached,
        "steps": killed.newest_step(),
        "prompts_again": round((len(graded[1]) - len(graded[0])) / group, 2),
        "prompts_skipped": len(prompts[0] - prompts[1]),
        "prompts": round(len(graded[0]) / group, 2),
    }


def newest_of(path: Path, read: Callable[[str], int | None]) -> int:
    """Return the largest step of a file of lines; 0 where it has none."""
    with contextlib.suppress(FileNotFoundError):
        found = [read(line) for line in path.read_text(errors="replace").splitlines()]
        return max((step for step in found if step is not None), default=0)
    return 0


def passive_environ(threads: int, **more: str) -> dict[str, str]:
    """Return an environment without network, in which idle threads leave the cores to others."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **more,
    }
