"""Evaluation while a run trains: the runner, the store and the statistics of vf-eval."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
from evaluation_world import NeverEnds, logged_evaluations, stored
from transformers import TrainerCallback

import verifiers as vf
from verifiers.cli.train import main
from verifiers.errors import ConfigError, NothingScoredError
from verifiers.evals.store import read_run
from verifiers.reports.server import find_runs


def test_an_evaluation_is_stored_as_vf_eval_stores_one(
    make_trainer: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from verifiers.cli.compare import main as compare

    trainer = make_trainer(
        tiny_world.single_turn(),
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        eval_temperature=0.7,
        num_generations_eval=2,
    )
    trainer.train()
    entries = logged_evaluations(trainer)
    assert [entry["step"] for entry in entries] == [2, 4]
    for entry in entries:
        run = read_run(stored(trainer, entry["step"]))
        assert run.metadata["optimizer_step"] == entry["step"]
        assert run.metadata["status"] == "finished"
        assert len(run.rows) == 4 * 2
        means = run.metadata["summary"]["rewards"]["reward"]
        assert entry["eval_reward"] == pytest.approx(means["mean"])
        assert entry["eval_reward_stderr"] == pytest.approx(means["stderr"])
        assert entry["eval_pass_at_2"] == pytest.approx(run.metadata["summary"]["pass_at_k"]["2"]["mean"])
        assert (run.directory / "report.html").is_file()
        # the four rows of the eval set are the first of the training set
        assert run.metadata["prompts_trained_on"] == entry["eval_prompts_trained_on"] == 4
    run = Path(trainer.args.output_dir)
    assert set(find_runs(run)) == {run.name, "evals/step-2", "evals/step-4"}
    capsys.readouterr()
    assert compare([str(stored(trainer, 2)), str(stored(trainer, 4)), "--json"]) == 0
    (comparison,) = json.loads(capsys.readouterr().out)["comparisons"]
    assert (comparison["paired"], comparison["common_prompts"]) == (True, 4)
    difference = entries[1]["eval_reward"] - entries[0]["eval_reward"]
    assert comparison["difference"]["mean"] == pytest.approx(difference)


def test_an_epoch_is_a_pass_over_the_prompts_and_saves_and_evaluations_follow_it(
    make_trainer: Callable[..., Any],
) -> None:
    # two blocks of two prompts an epoch; the last epoch is a half
    each = 2 * 2
    trainer = make_trainer(
        tiny_world.single_turn(count=4),
        max_steps=-1,
        num_train_epochs=2.5,
        save_strategy="epoch",
        eval_strategy="epoch",
        num_iterations=2,
    )
    trainer.train()
    steps = [each, 2 * each, 2.5 * each]
    assert [entry["step"] for entry in logged_evaluations(trainer)] == steps
    saved = Path(trainer.args.output_dir).glob("checkpoint-*")
    assert sorted(int(path.name.split("-")[1]) for path in saved) == steps
    trained = {entry["step"]: entry["epoch"] for entry in trainer.state.log_history if "loss" in entry}
    assert trained == {step: pytest.approx(step / each) for step in range(1, int(2.5 * each) + 1)}
    # the same prompts in each epoch
    for first in (0, 2):
        epoch = [*trainer.plan.example_ids(first), *trainer.plan.example_ids(first + 1)]
        assert sorted(epoch) == [0, 1, 2, 3]


def fails(completion: Any, **kwargs: Any) -> float:
    raise ValueError("the judge is away")


def unscorable() -> vf.SingleTurnEnv:
    return vf.SingleTurnEnv(eval_dataset=tiny_world.rows(3), rubric=vf.Rubric(funcs=[fails]))


def test_an_evaluation_in_which_nothing_was_scored_is_no_reward_of_0_and_training_continues(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        tiny_world.single_turn(),
        eval_env=unscorable(),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="eval_reward",
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.state.best_metric is None
    for entry in logged_evaluations(trainer):
        assert (entry["eval_prompts"], entry["eval_failed"]) == (3, 3)
        assert entry["eval_outcomes/grading_error"] == 3
        assert "eval_reward" not in entry
    warned = [record.getMessage() for record in caplog.records if "gave no reward" in record.getMessage()]
    assert len(warned) == 2
    assert "The evaluation of step 1" in warned[0]
    assert "the judge is away" in warned[0]
    # a call of one evaluation alone raises
    with tiny_world.closing(trainer), pytest.raises(NothingScoredError, match="the judge is away"):
        trainer.evaluate()


def test_an_evaluation_that_does_not_end_is_given_up_at_its_deadline(
    make_trainer: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(
        tiny_world.single_turn(),
        eval_env=NeverEnds(),
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_timeout=0.4,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert logged_evaluations(trainer) == []
    assert [read_run(stored(trainer, step)).metadata["status"] for step in (1, 2)] == ["stopped", "stopped"]
    assert "it did not end within 0.4 s (eval_timeout)" in caplog.text


def test_an_evaluation_that_cannot_be_stored_ends_the_run_with_what_to_do(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(tiny_world.single_turn(), max_steps=2, eval_strategy="steps", eval_steps=1)
    evals = Path(trainer.args.output_dir) / "evals"
    evals.parent.mkdir(parents=True, exist_ok=True)
    evals.write_text("a file where a directory should be")
    with pytest.raises(ConfigError, match=r"cannot be stored in .*evals.*save_evaluations=False"):
        trainer.train()


def test_no_key_of_an_environment_is_stored_with_an_evaluation(make_trainer: Callable[..., Any]) -> None:
    secret = "sk-0123456789abcdef"

    def judged(completion: Any, **kwargs: Any) -> float:
        raise ValueError(f"the judge refused {secret}")

    env = vf.SingleTurnEnv(eval_dataset=tiny_world.rows(2), rubric=vf.Rubric(funcs=[judged]))
    env.env_args = {"judge_api_key": secret}
    trainer = make_trainer(tiny_world.single_turn(), eval_env=env, max_steps=1, eval_strategy="steps", eval_steps=1)
    trainer.train()
    texts = [path.read_text() for path in stored(trainer, 1).iterdir() if path.is_file()]
    assert any("the judge refused ***" in text for text in texts)
    assert not any(secret in text for text in texts)


class WarmMember(vf.SingleTurnEnv):
    """A member of a group that fixes a temperature of its own, the trainer's."""

    def __init__(self) -> None:
        options: dict[str, Any] = {
            "sampling_args": {"temperature": 0.9},
            "rubric": vf.Rubric(funcs=[tiny_world.vowels]),
        }
        super().__init__(dataset=tiny_world.rows(16), eval_dataset=tiny_world.rows(2), **options)


@pytest.mark.parametrize(("asked", "grouped"), [(0.0, True), (0.4, False)])
def test_the_temperature_of_evaluations_is_theirs_and_not_that_of_training(
    make_trainer: Callable[..., Any], asked: float, grouped: bool
) -> None:
    env = vf.EnvGroup([WarmMember(), WarmMember()], ["one", "two"]) if grouped else WarmMember()
    trainer = make_trainer(env, max_steps=1, temperature=0.9, eval_temperature=asked)
    with tiny_world.closing(trainer):
        trainer.evaluate()
        evaluated = {body["temperature"] for body, _ in trainer.client.answers if "messages" in body}
        assert evaluated == {asked}
        trainer.client.answers.clear()
        trainer.train()
        trained = {body["temperature"] for body, _ in trainer.client.answers if "messages" in body}
    assert trained == {0.9}


class Counts(tiny_world.Dialogue):
    """Knows how many of its rollouts run at once, and how many of all that share its count."""

    def __init__(self, together: list[int], **options: Any) -> None:
        super().__init__(**options)
        self.together, self.running, self.most, self.most_together = together, 0, 0, 0

    async def rollout(self, *args: Any, **kwargs: Any) -> Any:
        self.running += 1
        self.together[0] += 1
        self.most = max(self.most, self.running)
        self.most_together = max(self.most_together, self.together[0])
        try:
            return await super().rollout(*args, **kwargs)
        finally:
            self.running -= 1
            self.together[0] -= 1


@pytest.mark.slow
def test_an_evaluation_keeps_to_its_share_and_all_rollouts_to_the_one_limit(
    make_trainer: Callable[..., Any],
) -> None:
    together = [0]
    training, evaluated = Counts(together), Counts(together, eval_dataset=tiny_world.rows(12))
    trainer = make_trainer(
        training,
        eval_env=evaluated,
        max_steps=2,
        max_concurrent=6,
        eval_strategy="steps",
        eval_steps=1,
        eval_max_concurrent=3,
    )
    seen = []

    class Notes(TrainerCallback):
        def on_evaluate(self, *args: Any, **kwargs: Any) -> None:
            seen.append(evaluated.most)
            evaluated.most = 0

    trainer.add_callback(Notes())
    trainer.train()
    assert seen == [3, 3]
    assert training.most == 6
    assert max(training.most_together, evaluated.most_together) == 6
    assert [entry["eval_prompts"] for entry in logged_evaluations(trainer)] == [12, 12]


# -- a run file ---------------------------------------------------------------------------------------------------


ENVIRONMENT = """
import verifiers as vf

def load_environment(letter="a", num_eval=0):
    def has(completion, **kwargs):
        return float(letter in completion[-1]["content"])

    rows = [{"question": f"{letter}{number}", "answer": ""} for number in range(8)]
    return vf.SingleTurnEnv(dataset=rows, eval_dataset=rows[:num_eval] or None, rubric=vf.Rubric(funcs=[has]))
"""

EVAL_SETS = """
[eval_environments.vowel]
id = "letters"
args = { letter = "e", num_eval = 3 }

[eval_environments.consonant]
id = "letters"
args = { letter = "t", num_eval = 2 }
"""


def test_a_run_file_says_what_is_evaluated_and_the_command_what_came_of_it(
    model_dir: Path,
    server: tiny_world.EmbeddedServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "letters.py").write_text(ENVIRONMENT)
    evaluating = {"eval_strategy": "steps", "eval_steps": 1, "eval_temperature": 0.9, "num_generations_eval": 2}
    saving = {"save_strategy": "steps", "save_steps": 1, "load_best_model_at_end": True}
    best = {"metric_for_best_model": "vowel_reward", "output_dir": "run", "server_url": server.url}
    tiny_world.write_run(tmp_path, model_dir, EVAL_SETS, env="letters", **evaluating, **saving, **best)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    try:
        assert main(["run.toml"]) == 0
    finally:
        sys.modules.pop("letters", None)
    shown = capsys.readouterr().out
    number = r"\d\.\d{3}"
    assert re.search(rf"^held-out reward of vowel at step 2: {number} ± {number} \(3 prompts\)$", shown, re.MULTILINE)
    assert re.search(r"^held-out reward of consonant at step 2: .* \(2 prompts\)$", shown, re.MULTILINE)
    assert re.search(rf"^best vowel_reward: {number} at step [12], whose weights are saved$", shown, re.MULTILINE)
    for name, letter, prompts in (("vowel", "e", 3), ("consonant", "t", 2)):
        run = read_run(tmp_path / "run" / "evals" / "step-1" / name)
        assert (run.metadata["env"], run.metadata["env_args"]["letter"]) == ("letters", letter)
        assert run.metadata["env_source"] is not None
        assert len(run.rows) == prompts * 2
