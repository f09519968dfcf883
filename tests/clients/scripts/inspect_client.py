"""Two evaluations by Inspect against the server: five questions, and five that need a tool."""

import os

os.environ["SERVED_BASE_URL"] = os.environ["OPENAI_BASE_URL"]
os.environ["SERVED_API_KEY"] = os.environ["OPENAI_API_KEY"]

from inspect_ai import Task, eval  # noqa: A004
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool

asked = []


@tool
def add():
    async def execute(a: int, b: int):
        """Adds two numbers.

        Args:
            a: one number
            b: another
        """
        asked.append((a, b))
        return str(a + b)

    return execute


def task(target, *solvers):
    samples = [Sample(input=f"Question {number}?", target=target) for number in range(5)]
    return Task(dataset=samples, solver=[*solvers, generate()], scorer=includes())


for asking in (task("It is 4."), task("The sum is 3.", use_tools(add()))):
    log = eval(asking, model="openai-api/served/taught", log_dir="logs", display="none", temperature=0)[0]
    assert log.status == "success", log.error
    assert len(log.samples) == 5
    assert log.results.scores[0].metrics["accuracy"].value == 1.0, [sample.output for sample in log.samples]
    assert all(usage.output_tokens > 0 for usage in log.stats.model_usage.values())
assert asked == [(1, 2)] * 5, asked
print("ok")
