"""Training with environments in workers has the rows, rewards and weights of training inline, also when resumed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny_world
import torch
from test_order import logged_without_clocks

import verifiers as vf
from verifiers.workers.settings import WorkerSettings

pytestmark = pytest.mark.slow


def in_workers(engine: str) -> Any:
    env = tiny_world.Dialogue()
    workers = WorkerSettings.parse(engine).open([(env, tiny_world.Dialogue)], blocked_s=60.0)
    return workers.of(env, env.get_dataset())


@pytest.mark.parametrize("workers", ["processes:2", pytest.param("ray:2", marks=pytest.mark.ray)])
def test_three_steps_in_workers_train_the_weights_of_three_steps_inline(
    new_trainer: Callable[..., Any],
    model_dir: Any,
    workers: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if workers.startswith("ray"):
        monkeypatch.setenv("RAY_ADDRESS", request.getfixturevalue("ray_cluster").address)
    trained = []
    for engine in ("inline", workers):
        with tiny_world.EmbeddedServer(model_dir, slots=1) as server:
            trainer = new_trainer(model_dir, in_workers(engine), server.url, max_steps=3)
            trainer.train()
        trained.append(trainer)
    inline, other = trained
    assert all(len(trainer.seen) == 6 for trainer in trained)
    for one, same in zip(inline.seen, other.seen, strict=True):
        assert one.keys() == same.keys()
        assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(same[name])) for name in one)
    assert logged_without_clocks(inline) == logged_without_clocks(other)
    before, after = (tiny_world.weights(trainer) for trainer in trained)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_with_workers_goes_on_from_its_checkpoint(
    new_trainer: Callable[..., Any], model_dir: Any, tmp_path: Path
) -> None:
    """Stopped in its third step, after a checkpoint of the second, with rollouts of the fourth in its workers."""
    settings = {
        "max_steps": 4, "save_strategy": "steps", "save_steps": 2, "num_iterations": 1, "drain_before_sync": True,
    }  # fmt: skip

    def trainer(engine: str, directory: str) -> Any:
        return new_trainer(model_dir, in_workers(engine), server.url, output_dir=tmp_path / directory, **settings)

    with tiny_world.EmbeddedServer(model_dir, slots=1) as server:
        whole = trainer("inline", "whole")
        whole.train()
        cut = trainer("processes:2", "cut")
        tiny_world.stop(cut, 3)
        second = trainer("processes:2", "cut")
        second.train(resume_from_checkpoint=True)
    assert second.seen[0]["step"] == 2
    before, after = tiny_world.weights(whole), tiny_world.weights(second)
    assert all(torch.allclose(before[name], after[name], rtol=0, atol=1e-6) for name in before)


# -- a program in a sandbox ---------------------------------------------------------------------------------------


AGENT = """
import json, os, sys, urllib.request

messages = json.loads(sys.argv[1])
said = ""
for turn in (1, 2):
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, "temperature": 0.1}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        messages.append(json.load(answer)["choices"][0]["message"])
    said += messages[-1]["content"]
    messages.append({"role": "user", "content": f"turn {turn}"})
vowels = sum(said.count(letter) for letter in "aeiou") + 0.01 * len(said)
json.dump({"reward": vowels, "length": len(said)}, open("reward.json", "w"))
"""


def test_a_programs_answers_are_trained_as_they_were_sampled(make_trainer: Callable[..., Any]) -> None:
    env = vf.ProgramEnv(
        ["python3", "agent.py", "{messages}"],
        files={"agent.py": AGENT},
        result="reward.json",
        dataset=tiny_world.rows(),
    )
    trainer = make_trainer(env, max_steps=1, max_concurrent=4)
    trainer.train()
    said = sorted(trainer.client.sampled())
    assert len(said) == 2 * 8
    assert trainer.trained_spans() == said
    # both turns of a rollout are one row
    assert len(list(trainer.rows())) == 8
    assert trainer.logged("rollouts/turns") == [2.0]
    assert trainer.logged("reward")[0] > 0
