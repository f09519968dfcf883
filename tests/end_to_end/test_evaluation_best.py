"""The best checkpoint by what evaluations found, and evaluations in a run that is cut and resumed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from evaluation_world import logged_evaluations, scripted, steps_of
from forks import Forked, Forks
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback

import verifiers as vf
from verifiers.errors import ConfigError
from verifiers.evals.store import read_run
from verifiers.monitoring.history import read_history
from verifiers.train.checkpoint.run_directory import newest_complete

EVERY_STEP = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 4}


def by_weights(server: tiny_world.EmbeddedServer, scores: dict[int, float]) -> vf.SingleTurnEnv:
    return scripted(scores, lambda: int(server.engine.weight_version))


def test_the_best_checkpoint_is_kept_and_loaded_at_the_end(make_trainer: Callable[..., Any], server: Any) -> None:
    trainer = make_trainer(
        tiny_world.single_turn(),
        eval_env=by_weights(server, {1: 0.2, 2: 0.9, 3: 0.4, 4: 0.1}),
        **EVERY_STEP,
        save_strategy="steps",
        save_steps=1,
        save_total_limit=2,
        load_best_model_at_end=True,
    )
    assert trainer.args.metric_for_best_model == "eval_reward"
    trainer.train()
    assert [entry["eval_reward"] for entry in logged_evaluations(trainer)] == [0.2, 0.9, 0.4, 0.1]
    assert (trainer.state.best_global_step, trainer.state.best_metric) == (2, 0.9)
    output_dir = Path(trainer.args.output_dir)
    assert Path(trainer.state.best_model_checkpoint) == output_dir / "checkpoint-2"
    assert steps_of(list(output_dir.glob("checkpoint-*"))) == ["checkpoint-2", "checkpoint-4"]
    best = load_file(output_dir / "checkpoint-2" / "model.safetensors")
    last = load_file(output_dir / "checkpoint-4" / "model.safetensors")
    assert all(torch.equal(trainer.model.state_dict()[name], tensor) for name, tensor in best.items())
    assert any(not torch.equal(best[name], last[name]) for name in best)


def test_the_best_is_saved_and_loaded_also_where_no_checkpoint_was_due(
    make_trainer: Callable[..., Any], server: Any
) -> None:
    env = by_weights(server, {1: 0.5, 2: 0.3, 3: 0.9, 4: 0.25})
    settings = {**EVERY_STEP, "save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    trainer = make_trainer(tiny_world.single_turn(), eval_env=env, **settings)
    trainer.train()
    output_dir = Path(trainer.args.output_dir)
    # the first evaluation was the best, too, when it came
    saved_at = [f"checkpoint-{step}" for step in (1, 2, 3, 4)]
    assert steps_of(list(output_dir.glob("checkpoint-*"))) == saved_at
    directory = output_dir / "checkpoint-3"
    assert trainer.state.best_model_checkpoint == str(directory)
    saved = load_file(directory / "model.safetensors")
    assert all(torch.equal(trainer.model.state_dict()[name], tensor) for name, tensor in saved.items())


def test_saving_the_best_alone_saves_when_an_evaluation_is_the_best_so_far(
    make_trainer: Callable[..., Any], server: Any
) -> None:
    env = by_weights(server, {1: 0.5, 2: 0.4, 3: 0.9, 4: 0.1})
    trainer = make_trainer(tiny_world.single_turn(), eval_env=env, **EVERY_STEP, save_strategy="best")
    trainer.train()
    output_dir = Path(trainer.args.output_dir)
    assert steps_of(list(output_dir.glob("checkpoint-*"))) == ["checkpoint-1", "checkpoint-3"]
    assert newest_complete(output_dir) == output_dir / "checkpoint-3"
    assert Path(trainer.state.best_model_checkpoint) == output_dir / "checkpoint-3"


def test_early_stopping_by_an_overlapped_evaluation_stops_at_the_next_block(
    make_trainer: Callable[..., Any], server: Any
) -> None:
    trainer = make_trainer(
        tiny_world.single_turn(),
        eval_env=by_weights(server, {1: 0.9, 2: 0.5, 3: 0.4, 4: 0.1}),
        **EVERY_STEP,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    trainer.add_callback(EarlyStoppingCallback(early_stopping_patience=1))
    trainer.train()
    assert [entry["step"] for entry in logged_evaluations(trainer)] == [1, 2]
    assert trainer.state.best_global_step == 1


def test_steps_before_the_best_are_in_the_record_of_the_run_that_resumes_from_it(
    make_trainer: Callable[..., Any], server: Any, tmp_path: Path
) -> None:
    env = by_weights(server, {1: 0.1, 2: 0.2, 3: 0.3, 4: 0.25, 5: 0.2, 6: 0.1})
    settings = {**EVERY_STEP, "max_steps": 6, "save_strategy": "best", "logging_steps": 6, "output_dir": tmp_path}
    tiny_world.stop(make_trainer(tiny_world.single_turn(), eval_env=env, **settings), 4)
    trainer = make_trainer(tiny_world.single_turn(), eval_env=env, **settings)
    trainer.train(resume_from_checkpoint=True)
    history = read_history(tmp_path)
    assert list(history.steps) == [1, 2, 3, 4, 5, 6]
    assert history.time.steps == 6


@pytest.mark.parametrize("schedule", ["reduce_lr_on_plateau", "greedy"])
def test_the_learning_rate_falls_where_the_reward_does_and_not_where_it_rises(
    make_trainer: Callable[..., Any], server: Any, schedule: str
) -> None:
    settings = {**EVERY_STEP, "lr_scheduler_type": schedule, "lr_scheduler_kwargs": {"patience": 0, "min_lr": 0.0}}
    # the rate of a step follows from the evaluations before it
    settings["max_steps"] = 7
    env = by_weights(server, {1: 0.5, 2: 0.6, 3: 0.7, 4: 0.5, 5: 0.3, 6: 0.1, 7: 0.0})
    trainer = make_trainer(tiny_world.single_turn(), eval_env=env, **settings)
    trainer.train()
    rates = trainer.logged("learning_rate")
    assert rates[:4] == sorted(rates[:4])
    assert rates[-1] < rates[3]


# -- a run that is cut -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stored_evaluations_are_those_of_the_runs_lineage(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    settings = {**EVERY_STEP, "eval_on_start": True, "save_strategy": "steps", "save_steps": 2}
    settings["output_dir"] = tmp_path
    first = make_trainer(tiny_world.single_turn(), **settings)
    tiny_world.stop(first, 4)
    evals = tmp_path / "evals"
    assert steps_of(list(evals.iterdir())) == ["step-0", "step-1", "step-2", "step-3"]
    for step in range(4):
        (evals / f"step-{step}" / "of-the-first-process").touch()
    second = make_trainer(tiny_world.single_turn(), **settings)
    second.train(resume_from_checkpoint=True)
    assert [entry["step"] for entry in logged_evaluations(second)] == [0, 1, 2, 3, 4]
    kept = [path for path in evals.iterdir() if (path / "of-the-first-process").exists()]
    assert steps_of(kept) == ["step-0", "step-1", "step-2"]
    # a new run in the same directory does not mix its own with these
    third = make_trainer(tiny_world.single_turn(), **{**settings, "max_steps": 1})
    before = third.evaluate()
    third.train()
    aside = tmp_path.with_name(f"{tmp_path.name}-earlier-1")
    assert {path.name for path in evals.iterdir()} == {"step-0", "step-0-2", "step-1"}
    assert steps_of(list((aside / "evals").iterdir())) == [f"step-{step}" for step in range(5)]
    assert read_run(evals / "step-0-2").metadata["summary"]["rewards"]["reward"]["mean"] == before["eval_reward"]


def test_a_metric_that_no_evaluation_has_is_refused_before_anything_is_loaded(
    make_trainer: Callable[..., Any],
) -> None:
    with pytest.raises(ConfigError, match=r"'rewrd', which no evaluation here has; did you mean 'eval_reward'\?"):
        make_trainer(tiny_world.single_turn(), **EVERY_STEP, metric_for_best_model="rewrd")
    named = {"easy": tiny_world.rows(2), "hard": tiny_world.rows(3)}
    settings = {**EVERY_STEP, "save_strategy": "best", "eval_dataset": named}
    with pytest.raises(ConfigError, match=r"'eval_reward', .* did you mean 'eval_(easy|hard)_reward'"):
        make_trainer(tiny_world.single_turn(), **settings)
    make_trainer(tiny_world.single_turn(), **settings, metric_for_best_model="hard_reward")
    # a reward function's name is known when it has been called
    trainer = make_trainer(tiny_world.single_turn(), **EVERY_STEP, metric_for_best_model="rewards/consonants")
    with pytest.raises(ConfigError, match=r"'rewards/consonants', which this .* eval_rewards/vowels"):
        trainer.train()


# -- several ranks, and processes that are killed -----------------------------------------------------------------


def given(model_dir: Path, server: Any, output_dir: Path, **settings: Any) -> dict[str, Any]:
    """Return what `run_training.run` takes."""
    where = {"model": str(model_dir), "url": server.url, "output_dir": str(output_dir)}
    return {**where, "env": "single", "resume": True, "settings": settings}


def evaluations(output_dir: Path, rank: int = 0) -> list[dict[str, Any]]:
    log = torch.load(output_dir / f"final-{rank}.pt")["log"]
    return [entry for entry in log if "eval_reward" in entry]


@pytest.mark.slow
@pytest.mark.timeout(200)
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
