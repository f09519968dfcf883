"""An agent that asks again until the object has the keys of its form; it knows the OpenAI client and nothing else.

vf-eval examples/real_model/form_filler.py -m smollm2 -b http://127.0.0.1:8000/v1 -n 32 -r 2 -t 64 -T 1
vf-train examples/real_model/form_filler.toml
"""

from __future__ import annotations

import json
from typing import Any

import openai
from structured_output import field_match, fields

import verifiers as vf

__all__ = ["load_environment", "run"]

TRIES = 3


async def run(row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> str:
    """Return the first object that has all keys and no other, or the last answer."""
    messages, text = list(row["prompt"]), ""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(TRIES):
            answer = await client.chat.completions.create(model=model, messages=messages)
            text = answer.choices[0].message.content or ""
            if {path[:1] for path in fields(text)} == {(key,) for key in row["info"]["keys"]}:
                break
            complaint = f"Write a JSON object with exactly these keys: {', '.join(row['info']['keys'])}."
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": complaint}]
    return text


def tries(state: vf.State) -> float:
    return float(len(state["trajectory"]))


def load_environment(num_train: int = 2000, num_eval: int = 64) -> vf.Environment:
    """Build the environment from `structured-output` at level 1."""
    base = vf.load_environment("structured-output", num_train=num_train, num_eval=num_eval)
    train, evaluated = (
        [{"prompt": row["prompt"], "answer": row["answer"], "info": {"keys": list(json.loads(row["answer"]))}}
         for row in rows]
        for rows in (base.get_dataset(), base.get_eval_dataset())
    )  # fmt: skip
    parser = vf.MaybeThinkParser(fields)
    rubric = vf.Rubric(funcs=[field_match, tries], weights=[1.0, 0.0], parser=parser)
    return vf.AgentEnv(run, dataset=train, eval_dataset=evaluated, parser=parser, rubric=rubric)
