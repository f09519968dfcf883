"""Environments of `benchmarks/workers.py`, in a module that worker processes can import."""

from __future__ import annotations

import time

import verifiers as vf

ROW = {"prompt": [{"role": "user", "content": "What is 6 times 7?"}], "answer": "42"}


def burns_50_ms(completion: vf.Messages) -> float:
    ends = time.thread_time() + 0.05
    while time.thread_time() < ends:
        pass
    return 1.0


def returns_1(completion: vf.Messages) -> float:
    return 1.0


def busy() -> vf.Environment:
    return vf.SingleTurnEnv(eval_dataset=[ROW], rubric=vf.Rubric(funcs=[burns_50_ms]))


def empty() -> vf.Environment:
    return vf.SingleTurnEnv(eval_dataset=[ROW], rubric=vf.Rubric(funcs=[returns_1]))
