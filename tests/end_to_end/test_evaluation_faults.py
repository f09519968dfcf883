"""Evaluations on several ranks, and in processes that are killed."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from evaluation_world import steps_of
from forks import Forked, Forks

from verifiers.evals.store import read_run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]


def given(model_dir: Path, server: Any, output_dir: Path, **settings: Any) -> dict[str, Any]:
    """Return what `run_training.run` takes."""
    where = {"model": str(model_dir), "url": server.url, "output_dir": str(output_dir)}
    return {**where, "env": "single", "resume": True, "settings": settings}


def evaluations(output_dir: Path, rank: int = 0) -> list[dict[str, Any]]:
    log = torch.load(output_dir / f"final-{rank}.pt")["log"]
    return [entry for entry in log if "eval_reward" in entry]


def test_every_rank_learns_what_rank_0_evaluated(
    forks: Forks, model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path
) -> None:
    settings = {
        "per_device_train_batch_size": 2,
        "max_steps": 4,
        "num_batches_ahead": 1,
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "save_total_limit": 2,
        "load_best_model_at_end": True,
    }
    log = tmp_path / "log"
    code = forks.run("run_training:run", given(model_dir, server, tmp_path, **settings), log, ranks=2)
    assert code == 0, log.read_text()
    zero, one = evaluations(tmp_path, 0), evaluations(tmp_path, 1)
    assert [entry["step"] for entry in zero] == [1, 2, 3, 4]
    assert zero == one
    # both loaded the same best weights
    finals = [torch.load(tmp_path / f"final-{rank}.pt")["weights"] for rank in (0, 1)]
    assert all(torch.equal(tensor, finals[1][name]) for name, tensor in finals[0].items())
    assert steps_of(list((tmp_path / "evals").iterdir())) == [f"step-{step}" for step in range(1, 5)]


def test_a_run_killed_while_it_evaluates_logs_each_evaluation_once(
    forks: Forks, model_dir: Path, server: tiny_world.EmbeddedServer, tmp_path: Path
) -> None:
    settings = {
        "max_steps": 6,
        "num_batches_ahead": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_max_concurrent": 1,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    log = tmp_path / "log"

    def start() -> Forked:
        return forks.start("run_training:run", given(model_dir, server, tmp_path, **settings), log)

    for step in (2, 4):
        process, until = start(), time.monotonic() + 60
        results = tmp_path / "evals" / f"step-{step}" / "results.jsonl"
        while not results.exists():
            assert process.code is None, log.read_text()
            assert time.monotonic() < until
            time.sleep(0.001)
        process.kill()
        forks.wait(process, 60)
    assert forks.wait(start(), 60) == 0, log.read_text()
    entries = evaluations(tmp_path)
    assert [entry["step"] for entry in entries] == [2, 4, 6]
    for entry in entries:
        run = read_run(tmp_path / "evals" / f"step-{entry['step']}")
        assert run.metadata["status"] == "finished"
        assert len(run.rows) == entry["eval_prompts"] == 4
        assert entry["eval_reward"] == pytest.approx(run.metadata["summary"]["rewards"]["reward"]["mean"])
