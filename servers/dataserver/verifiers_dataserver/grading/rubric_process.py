"""The process that holds an environment and grades by its rubric; started by `rubrics.RubricChild`, never by hand.

The first line of its input names the environment, every further one is a group; answers are lines too. It
ends with its input, which is closed when its parent ends, however that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import threading
from typing import Any


async def graded(environment: Any, request: dict[str, Any]) -> list[dict[str, Any]]:
    """Score one group, {"row": ..., "items": [{"text", "tokens", "messages"}], "timeout_s"}, by the rubric."""
    from verifiers.envs.multiturn_env import begin_turns
    from verifiers.rollouts.rollout import RolloutRequest
    from verifiers.rollouts.run import begin_state
    from verifiers.types import RolloutKey

    row, states = request["row"], []
    given = RolloutRequest(
        RolloutKey(0, row.get("example_id", 0), 0), row["prompt"], row["answer"], row["task"], row["info"]
    )
    for item in request["items"]:
        state = begin_state(given, None, "", {})
        begin_turns(state, environment.oai_tools)
        said = item["text"] if isinstance(row["prompt"], str) else item["messages"]
        state["completion"] = said
        response = _response(item)
        state["responses"], state["turn"], state["is_completed"] = [response], 1, True
        state["trajectory"] = [{"prompt": state["prompt"], "completion": said, "response": response}]
        states.append(state)
    return [_result(score) for score in await environment.rubric.score_group(states)]


def _response(item: dict[str, Any]) -> dict[str, Any]:
    """Return what stands in for the server's answer: reward functions of length read its usage."""
    response: dict[str, Any] = {"choices": [{"message": item["messages"][-1], "text": item["text"]}]}
    if item["tokens"] is not None:
        response["usage"] = {"completion_tokens": item["tokens"]}
    return response


def _result(score: Any) -> dict[str, Any]:
    if score.errors:
        return {"problem": score.errors[0]["error"], "func": score.errors[0]["func"]}
    return {"reward": score.reward, "metrics": score.metrics}


async def _answer(environment: Any, request: dict[str, Any], out: Any) -> None:
    answer: dict[str, Any] = {"number": request["number"]}
    try:
        async with asyncio.timeout(request["timeout_s"]):
            answer["results"] = await graded(environment, request)
    except TimeoutError:
        answer["timed_out"] = True
    except Exception as error:
        failure = {"problem": f"{type(error).__name__}: {error}", "func": "score_group"}
        answer["results"] = [failure for _ in request["items"]]
    out.write(json.dumps(answer, default=str) + "\n")
    out.flush()


async def _serve(environment: Any, out: Any) -> None:
    loop = asyncio.get_running_loop()
    requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(requests.put_nowait, json.loads(line))
        # a reward function that hangs must not keep the process
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    async with asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(_answer(environment, await requests.get(), out))


def main() -> None:
    """Load the environment and serve its rubric until the input ends."""
    # what an environment prints must not be taken for an answer
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    first = json.loads(sys.stdin.readline())

    from verifiers.envs.registry import load_environment
    from verifiers_dataserver.grading.worker_functions import lower_priority

    environment = load_environment(first["id"], **first["args"])
    lower_priority()
    out.write("ready\n")
    out.flush()
    asyncio.run(_serve(environment, out))


if __name__ == "__main__":
    main()
