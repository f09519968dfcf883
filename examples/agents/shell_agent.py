"""A shell program, made of curl and jq, that is trained to spell words backward.

    vf-eval examples/agents/shell_agent.py -m MODEL -b URL
    vf-train examples/agents/shell_agent.toml

Needs bash, curl 7.82 or newer and jq on this machine.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import verifiers as vf

__all__ = ["load_environment"]

PROGRAM = Path(__file__).with_name("shell_agent.sh")
NUM_EVAL = 200


def correct(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment(sandbox: str = "auto") -> vf.Environment:
    """Build the environment; the eval words are never trained on.

    Args:
        sandbox: isolation level of the program.
    """
    words = ["".join(letters) for letters in itertools.product("klmnst", "aeiou", "klmnst")]
    words += ["".join(letters) for letters in itertools.product("klmnst", "aeiou", repeat=2)]
    random.Random(1).shuffle(words)
    rows = [{"question": f"Spell backward: {word}", "answer": word[::-1]} for word in words]
    return vf.ProgramEnv(
        ["bash", PROGRAM.name, "{prompt}"],
        files={PROGRAM.name: PROGRAM},
        sandbox=vf.SandboxSpec(sandbox),
        dataset=rows[NUM_EVAL:],
        eval_dataset=rows[:NUM_EVAL],
        rubric=vf.Rubric(funcs=[correct]),
    )
