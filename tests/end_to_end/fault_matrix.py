"""Outcomes of faults: one cell for each fault and stage.

`Goes` on: the run ends as if nothing had been, but for rollouts that are recorded as dropped. `Ends`: within
`within_s` seconds, with that error and those words; the same command, given again, finishes the run. `Never`: it
cannot happen, and why.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CELLS", "FAULTS", "STAGES", "Cell", "Ends", "Goes", "Never", "as_markdown"]

STAGES = {
    "generating": "the trainer waits for a block whose rollouts are in flight",
    "scoring": "a group of the block that the trainer waits for is being scored",
    "training": "in a forward pass; rollouts of the next block are in flight",
    "syncing": "the server is paused and is to load the weights; rollouts are in flight",
    "saving": "a checkpoint is half written; rollouts of the next block are in flight",
}

FAULTS = {
    "rollout raises": "the environment's code raises",
    "reward raises": "a reward function raises",
    "environment hangs": "the environment's code never returns",
    "server 500s": "the server answers 500 for a moment",
    "server hangs": "the server's process is stopped: connections open, nothing is answered",
    "server dies": "the server's process is killed and nobody starts it again",
    "server restarts": "the server's process is killed and started again, with its first weights",
    "sync fails": "the server does not take the weights",
    "generator thread killed": "the thread that owns all rollouts ends",
    "disk full at checkpoint": "no room is left on the disk of the checkpoints",
    "rank 1 raises": "user code raises on the second of two processes",
    "Ctrl-C": "SIGINT",
    "SIGTERM": "what a scheduler sends before it kills",
    "kill -9": "SIGKILL",
}


@dataclass(frozen=True, slots=True)
class Goes:
    """The run continues.

    Attributes:
        dropped: the reason under which the rollouts that met the fault are recorded; None where none are lost.
    """

    dropped: str | None = None


@dataclass(frozen=True, slots=True)
class Ends:
    """The run ends.

    Attributes:
        error: the error's class, or the command's word, in one line of the output; one of several.
        words: what else that line says, as a regular expression.
        code: of the process.
        within_s: from the fault to the end of the process.
    """

    error: str
    words: str = ""
    code: int = 1
    within_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Never:
    """Fault that cannot happen."""

    why: str


Cell = Goes | Ends | Never

# the deadlines that the tests set: a fault that only a deadline can find out takes as long
DEADLINE_S = 2.5


def _found_out(words: str) -> Ends:
    """By the next push, or by the rollouts in flight: whichever runs out of time first."""
    return Ends("WeightSyncError or NothingScoredError", words, within_s=5.0 + 2 * DEADLINE_S)


_ONLY_WHILE_SAVING = Never("a full disk meets a checkpoint only while one is written")
_PUSHED_AGAIN = Goes()

CELLS: dict[tuple[str, str], Cell] = {
    **{("rollout raises", stage): Goes("environment_error") for stage in STAGES},
    **{("reward raises", stage): Goes("grading_error") for stage in STAGES},
    **{("environment hangs", stage): Goes("timed_out") for stage in STAGES},
    **{("server 500s", stage): Goes() for stage in STAGES},
    **{("server hangs", stage): _found_out("got no answer|did not answer|timed_out") for stage in STAGES},
    ("server hangs", "generating"): Ends("NothingScoredError", "8 timed_out", within_s=5.0 + DEADLINE_S),
    **{("server dies", stage): _found_out("did not reach|no rollout server was up") for stage in STAGES},
    ("server dies", "generating"): Ends("NothingScoredError", "no rollout server was up", within_s=5.0 + DEADLINE_S),
    **{("server restarts", stage): Goes() for stage in STAGES},
    # a server that was started again is given the weights by another thread, in whatever stage the trainer is
    **{("sync fails", stage): _PUSHED_AGAIN for stage in STAGES},
    ("sync fails", "syncing"): Ends("WeightSyncError", "did not reach the rollout server"),
    **{("generator thread killed", stage): Ends("GenerationError", "generator's thread") for stage in STAGES},
    **{("disk full at checkpoint", stage): _ONLY_WHILE_SAVING for stage in STAGES},
    ("disk full at checkpoint", "saving"): Ends("CheckpointError", "checkpoint-4"),
    **{("rank 1 raises", stage): Ends("RankError", "the second rank's own mistake") for stage in STAGES},
    **{("Ctrl-C", stage): Ends("interrupted", code=130) for stage in STAGES},
    **{("SIGTERM", stage): Ends("ended by SIGTERM", code=143) for stage in STAGES},
    **{("kill -9", stage): Ends("", code=-9) for stage in STAGES},
}


def as_markdown() -> str:
    """Return the table as docs/concepts/faults.md has it."""
    lines = ["| what breaks | " + " | ".join(STAGES) + " |", "|---" * (len(STAGES) + 1) + "|"]
    for fault, meaning in FAULTS.items():
        cells = [_in_words(CELLS[fault, stage]) for stage in STAGES]
        lines.append(f"| **{fault}**: {meaning} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _in_words(cell: Cell) -> str:
    if isinstance(cell, Never):
        return "cannot happen"
    if isinstance(cell, Goes):
        return f"continues; `{cell.dropped}`" if cell.dropped else "continues"
    if cell.code < 0:
        return "ends"
    if cell.error.endswith("Error"):
        return "ends: " + " or ".join(f"`{error}`" for error in cell.error.split(" or "))
    return f"ends: \u201c{cell.error}\u201d"
