"""An agent of the `openai-agents` SDK that is trained to use its tool.

The agent is asked what an article costs. Its tool gives the price of a code, and an article's code is its name
spelled backward: only a policy that gives the tool the right code, and then repeats what the tool says, is right.

    vf-train examples/agents/sdk_agent.toml

Needs `pip install openai-agents`.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import openai
from agents import Agent, AgentsException, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool

import verifiers as vf

__all__ = ["load_environment", "price", "run"]

NAMES = ["".join(letters) for letters in itertools.product("klmnst", "aeiou", repeat=2)]
random.Random(0).shuffle(NAMES)
PRICES = {name[::-1]: str(10 + place % 90) for place, name in enumerate(NAMES)}
NUM_EVAL = 200


@function_tool
def price(code: str) -> str:
    """Return the price of a code."""
    return PRICES.get(code, "unknown")


async def run(row: dict[str, Any], *, base_url: str, api_key: str, model: str) -> str:
    """Answer one question; what the policy does wrong is an answer too, so that it has a reward."""
    # the gateway is plain HTTP: to load the certificates for each rollout would take longer than its calls
    plain = openai.DefaultAsyncHttpxClient(verify=False)
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=plain) as client:
        agent = Agent(name="clerk", tools=[price], model=OpenAIChatCompletionsModel(model, client))
        try:
            result = await Runner.run(agent, row["prompt"], run_config=RunConfig(tracing_disabled=True))
        except AgentsException:
            # a tool that does not exist, or arguments that are not JSON
            return ""
    return str(result.final_output)


def correct(completion: vf.Messages, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def load_environment() -> vf.Environment:
    """Build the environment; the articles of the eval questions are never trained on."""
    rows = [{"question": f"Price of {name}?", "answer": PRICES[name[::-1]]} for name in NAMES]
    return vf.AgentEnv(
        run,
        dataset=rows[NUM_EVAL:],
        eval_dataset=rows[:NUM_EVAL],
        rubric=vf.Rubric(funcs=[correct]),
        max_turns=3,
    )
