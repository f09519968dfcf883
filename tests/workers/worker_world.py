"""Environments that workers make, a scripted model, and an engine whose workers run in the test's own event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import verifiers as vf
from verifiers.errors import ProviderError
from verifiers.inference.limiter import Limiter
from verifiers.inference.retry import RetryPolicy
from verifiers.inference.wire import WireObject
from verifiers.rollouts.block import BatchRequest, BlockRun, GroupPolicy
from verifiers.rollouts.rollout import Group, RolloutRequest, ScoredBlock
from verifiers.rollouts.run import Run
from verifiers.testing.script import response_body
from verifiers.types import RolloutKey
from verifiers.workers.pool import RemoteWorkers, WorkerLink
from verifiers.workers.worker import RolloutWorker

WITHIN_S = 180.0
ROWS = [{"question": f"say {word}", "answer": word, "info": {"number": n}} for n, word in enumerate("abcdef")]


def agrees(completion: vf.Messages, answer: str) -> float:
    return float(answer in str(completion))


def compares(completions: list[vf.Messages]) -> list[float]:
    """Compare the rollouts of a group: the reward is the rank of a rollout's text."""
    texts = [str(completion) for completion in completions]
    return [sorted(texts).index(text) / len(texts) for text in texts]


def one_turn() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[agrees, compares], weights=[1.0, 0.5]))


class Dialogue(vf.MultiTurnEnv):
    """Three turns, the first in a role; the user's words depend on the row, and an untrained call makes them."""

    def __init__(self) -> None:
        by_turn, by_role = (
            vf.turn_reward(lambda state: [0.5] * state["turn"]),
            vf.role_reward(lambda: {"guesser": 1.0}),
        )
        rubric = vf.Rubric(funcs=[agrees, self.has_notes, by_turn, by_role])
        super().__init__(dataset=ROWS, max_turns=3, rubric=rubric)

    async def has_notes(self, state: vf.State) -> float:
        # of a kind that no JSON can hold: scores are made where the rollout was played
        return float(isinstance(state["notes"], frozenset))

    async def get_model_response(self, client: Any, model: str, prompt: Any, *args: Any, **kwargs: Any) -> Any:
        asked = client.role("guesser") if len(prompt) == 1 else client
        return await super().get_model_response(asked, model, prompt, *args, **kwargs)

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        state["notes"] = frozenset({"said", len(messages)})
        state["trajectory"][-1]["reward"] = float(len(messages))
        helper = state["client"].untrained
        hint = await helper.chat.completions.create(model=state["model"], messages=[messages[0]])
        content = f"{state['answer']} or {hint.choices[0].message.content}?"
        return [{"role": "user", "content": content}]


class Stalls(Dialogue):
    """Waits for good after the second answer."""

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> vf.Messages:
        if state["turn"] == 2:
            await asyncio.sleep(3600)
        return await super().env_response(messages, state, **kwargs)


class PlaysItself(vf.SingleTurnEnv):
    """Overrides `run_rollouts` and plays one rollout after the other, with another prompt."""

    async def run_rollouts(self, requests: Any, run: Any) -> Any:
        rollouts = []
        for request in requests:
            longer = [*request.prompt, {"role": "user", "content": "shortly"}]
            rollouts += await super().run_rollouts([dataclasses.replace(request, prompt=longer)], run)
        return rollouts


class Talkative(vf.SingleTurnEnv):
    """Logs and prints, and says what is imported in its process."""

    def __init__(self) -> None:
        super().__init__(dataset=ROWS, rubric=vf.Rubric(funcs=[agrees]))

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        logging.getLogger("mine").warning("a log line of the %s", "environment")
        print("a printed line")
        state["modules"] = sorted(sys.modules)
        return state


SCORES = asyncio.Event()
"""Set where rewards of `scored_later` may be given."""


async def when_told(**_: Any) -> float:
    await SCORES.wait()
    return 1.0


def scored_later() -> vf.Environment:
    return vf.SingleTurnEnv(dataset=ROWS, rubric=vf.Rubric(funcs=[when_told]))


def plays_itself() -> vf.Environment:
    return PlaysItself(dataset=ROWS, rubric=vf.Rubric(funcs=[agrees]))


async def agent(row: Any, *, base_url: str, api_key: str, model: str) -> str:
    """Ask twice by HTTP, as any framework would."""
    import aiohttp

    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        said = ""
        for _ in range(2):
            body = {"model": model, "messages": [*row["prompt"], {"role": "user", "content": said or "go"}]}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                said = (await response.json())["choices"][0]["message"]["content"]
    return said


def with_agent() -> vf.Environment:
    return vf.AgentEnv(agent, dataset=ROWS, rubric=vf.Rubric(funcs=[agrees]))


async def asking_agent(what: str, row: Any, *, base_url: str, api_key: str, model: str) -> str:
    """Ask for something that training cannot use, and then for an answer."""
    import aiohttp

    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    refused = {"messages": image} if what == "image" else {"messages": row["prompt"], "tool_choice": "required"}
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as session:
        for body, status in ((refused, 400), ({"messages": row["prompt"]}, 200)):
            async with session.post(f"{base_url}/chat/completions", json={"model": model, **body}) as response:
                answer = await response.json()
            assert response.status == status, answer
    return str(answer["choices"][0]["message"]["content"])


def with_asking_agent(what: str) -> vf.Environment:
    run = functools.partial(asking_agent, what)
    return vf.AgentEnv(run, dataset=ROWS, rubric=vf.Rubric(funcs=[agrees]))


class Faulty(vf.SingleTurnEnv):
    """Does what the row's answer says, in the reward where it begins with "score"."""

    def __init__(self, directory: str = "") -> None:
        rows = [{"question": f"do {what}", "answer": what} for what in FAULTS]
        super().__init__(dataset=rows, rubric=vf.Rubric(funcs=[self.graded]))
        self.directory = Path(directory)

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        if not state["answer"].startswith("score "):
            await self.do(state["answer"], state)
        return await super().setup_state(state, **kwargs)

    async def graded(self, answer: str, state: vf.State) -> float:
        if answer.startswith("score "):
            await self.do(answer.removeprefix("score "), state)
        return 1.0

    async def do(self, what: str, state: vf.State) -> None:
        if what == "raise":
            raise LookupError("the environment's own")
        if what == "wait":
            await asyncio.sleep(3600)
        if what == "hang":
            time.sleep(3600)  # noqa: ASYNC251 - it blocks the event loop
        if what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "die once":
            try:
                (self.directory / "died").touch(exist_ok=False)
            except FileExistsError:
                return
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "start a process":
            child = await asyncio.create_subprocess_exec("sleep", "3600")
            (self.directory / "child").write_text(f"{child.pid} {os.getpid()}")
            await asyncio.sleep(3600)
        if what.startswith("await release"):
            (self.directory / what).touch()
            while not (self.directory / "release").exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(0.05)
        if what == "fill memory":
            import resource

            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, resource.RLIM_INFINITY))
            state["filled"] = "x" * (1 << 31)
        if what == "ask in vain":
            messages = [{"role": "user", "content": "fail"}]
            await state["client"].chat.completions.create(model=state["model"], messages=messages)
        if what == "mistake":
            raise vf.ConfigError("a mistake that every rollout repeats")


class Overlong(vf.Environment):
    """Meets a prompt that is too long in some of a prompt's rollouts, and lets that out or keeps it."""

    def __init__(self) -> None:
        rows = [{"question": "a", "answer": how} for how in ("let out", "keep")]
        super().__init__(dataset=rows, rubric=vf.Rubric(funcs=[lambda completion: float(len(completion))]))

    async def play(self, state: vf.State) -> None:
        answer = await state["client"].chat.completions.create(model=state["model"], messages=state["prompt"])
        state["completion"] = [{"role": "assistant", "content": answer.choices[0].message.content}]
        if state["completion"][0]["content"] > "d":
            return
        error = vf.OverlongPromptError("the context has 8 tokens")
        if state["answer"] == "let out":
            raise error
        state["error"] = error


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


class Scripted(vf.SingleTurnEnv):
    """Begins its rollouts by `act`, which a test sets: workers of `InLoop` share its process."""

    act: Callable[[vf.State], Any]

    def __init__(self) -> None:
        super().__init__(dataset=ROWS, rubric=vf.Rubric(funcs=[agrees]))

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        await type(self).act(state)
        return await super().setup_state(state, **kwargs)


FAULTS = (
    "",
    "raise",
    "wait",
    "hang",
    "die",
    "die once",
    "fill memory",
    "ask in vain",
    "mistake",
    "score raise",
    "score die once",
    "score wait",
    "start a process",
    "await release",
    "await release, too",
)


class Model:
    """A backend that answers by seed and messages alone, and fails where the last message says so."""

    base_url = "http://model/v1"
    api_key = "key"

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.in_flight = self.most_in_flight = 0

    async def call(self, path: str, arguments: Any) -> Any:
        self.calls.append(dict(arguments))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(0.001)
        self.in_flight -= 1
        asked = str(arguments["messages"][-1]["content"])
        if asked == "fail":
            raise ProviderError("no", status=400)
        draw = random.Random(f"{arguments.get('seed')}:{asked}")
        text = "".join(draw.choice("abcdef") for _ in range(4))
        body = {"model": "policy", "messages": arguments["messages"], "logprobs": True, "return_token_ids": True}
        return WireObject(response_body(body, [text], model="policy", token_ids=True))

    async def close(self) -> None:
        """Nothing is open."""


class InLoop:
    """An engine whose workers run in this event loop."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.running: list[_InLoop] = []

    async def open(self) -> int:
        return self.count

    async def start(self, link: WorkerLink) -> _InLoop:
        ours, theirs = socket.socketpair()
        worker = RolloutWorker(lambda worker, load: None)
        loop = asyncio.get_running_loop()
        try:
            for sock, connection in ((ours, link.connection), (theirs, worker.connection)):
                sock.setblocking(False)
                await loop.create_unix_connection(lambda connection=connection: connection, sock=sock)
        except asyncio.CancelledError:
            ours.close()
            theirs.close()
            raise
        running = _InLoop(worker)
        self.running.append(running)
        return running

    async def close(self) -> None:
        """Nothing is shared."""


def kill_at_score(played: Any, engine: InLoop) -> None:
    """Let the first worker be killed when the first group is to be scored."""
    score_group, has_killed = played.rubric.score_group, []

    async def score(states: Any) -> Any:
        if not has_killed:
            has_killed.append(True)
            engine.running[0].kill()
        return await score_group(states)

    played.rubric.score_group = score


class _InLoop:
    def __init__(self, worker: RolloutWorker) -> None:
        self.worker = worker
        self.task = asyncio.create_task(worker.serve())

    def kill(self) -> None:
        self.worker.connection._transport.abort()
        self.worker.ended.set()

    async def wait(self) -> str:
        await asyncio.wait([self.task])
        return "was killed"


def workers_of(make: Callable[[], Any], engine: Any = None, **options: Any) -> tuple[Any, RemoteWorkers]:
    """Return an environment as workers play it, and the workers."""
    env = make()
    engine = engine or InLoop()
    workers = RemoteWorkers(lambda: engine, [(env, make)], **options)
    return workers.of(env, env.get_dataset()), workers


def runner_of(env: Any, model: Model | None = None, *, slots: int = 64, **options: Any) -> Run:
    retry = RetryPolicy(max_attempts=1)
    return Run(env, model or Model(), "policy", {}, limiter=Limiter(slots), retry=retry, **options)


def requests_of(env: Any, rows: Sequence[int], size: int = 2) -> list[list[RolloutRequest]]:
    dataset = env.get_dataset()
    return [
        [
            RolloutRequest(
                RolloutKey(0, row, generation),
                dataset[row]["prompt"],
                dataset[row]["answer"],
                seed=10 * row + generation,
            )
            for generation in range(size)
        ]
        for row in rows
    ]


def fault_requests(*names: str, size: int = 2) -> list[list[RolloutRequest]]:
    return requests_of(Faulty(), [FAULTS.index(name) for name in names], size)


async def play(runner: Run, names: Sequence[str], *, retries: int = 0, size: int = 2) -> ScoredBlock:
    """Play a block of rollouts of `Faulty` as training does."""
    requests = [request for group in fault_requests(*names, size=size) for request in group]
    async with asyncio.timeout(WITHIN_S):
        return await BlockRun(runner, BatchRequest(0, requests), policy=GroupPolicy(retries)).run(0)


async def until(is_true: Callable[[], Any]) -> None:
    while not is_true():  # noqa: ASYNC110 - a process tells nobody
        await asyncio.sleep(0.05)


def processes_with(text: str) -> list[int]:
    """Return the processes whose command or environment has this text."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def plain_of(groups: Sequence[Group]) -> list[dict[str, Any]]:
    """Return what training and results read of rollouts, without times."""
    return [
        {
            "key": one.key, "outcome": one.outcome, "prompt": one.prompt, "completion": one.completion,
            "answer": one.answer, "task": one.task, "info": one.info, "reward": one.reward, "metrics": one.metrics,
            "rows": one.rows, "forks": one.forks, "turns": one.turns, "usage": one.usage, "attempts": one.attempts,
            "failure": one.failure,
        }
        for group in groups
        for one in group.rollouts
    ]  # fmt: skip


def load_environment() -> vf.Environment:
    return one_turn()
