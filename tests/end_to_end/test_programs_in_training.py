"""Training on the answers that a program in a sandbox got, and on the reward that it wrote."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny_world

import verifiers as vf

pytestmark = pytest.mark.slow

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
