"""The processes that grade by rubrics: what becomes of one that loads long, is given up on, or hangs as a whole."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from verifiers_dataserver.config import EnvironmentTable
from verifiers_dataserver.grading import rubrics
from verifiers_dataserver.grading.graders import Task
from verifiers_dataserver.grading.rubrics import RubricGrader
from verifiers_dataserver.tasks import Completion, Row

# Stands in for `rubric_process`, which takes seconds to load: "hang" keeps it from ever saying anything again.
PROCESS = """
import json, os, sys, time
first = json.loads(sys.stdin.readline())
open(first["args"]["starts"], "a").write("x")
while not os.path.exists(first["args"]["gate"]):
    time.sleep(0.005)
time.sleep(first["args"]["load_s"])
if first["id"] == "broken":
    sys.exit(1)
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    texts = [item["text"] for item in asked["items"]]
    if "hang" in texts:
        time.sleep(1e6)
    if "die" in texts:
        os._exit(1)
    results = [{"reward": float(text == asked["row"]["answer"]), "metrics": {}} for text in texts]
    print(json.dumps({"number": asked["number"], "results": results}), flush=True)
"""


class World:
    """A grader over the stand-in; the environment is loaded once `gate` exists."""

    def __init__(self, directory: Path) -> None:
        self.gate, self._starts = directory / "gate", directory / "starts"
        self._graders: list[RubricGrader] = []
        self.gate.touch()

    def grader(self, name: str = "env", *, wait_s: float = 60.0, load_s: float = 0.0, **fields: Any) -> RubricGrader:
        args = {"gate": str(self.gate), "starts": str(self._starts), "load_s": load_s}
        rubric = SimpleNamespace(has_group_funcs=False)
        table = EnvironmentTable(id=name, args=args, **fields)
        self._graders.append(RubricGrader("rubric", table, SimpleNamespace(rubric=rubric), wait_s))
        return self._graders[-1]

    @property
    def starts(self) -> int:
        return len(self._starts.read_text()) if self._starts.exists() else 0

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110 - a file of another process
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        for grader in self._graders:
            await grader.close()


@pytest_asyncio.fixture
async def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(rubrics, "_COMMAND", (sys.executable, "-S", "-E", "-c", PROCESS))
    made = World(tmp_path)
    yield made
    await made.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give groups that hang 0.3 s, which they wait for in full, and all others as long as they need."""
    ask = rubrics.RubricChild.ask

    async def ask_in(child: Any, body: dict[str, Any], timeout_s: float) -> Any:
        return await ask(child, body, 0.3 if "hang" in [item["text"] for item in body["items"]] else 30.0)

    monkeypatch.setattr(rubrics.RubricChild, "ask", ask_in)


async def graded(grader: RubricGrader, *texts: str) -> list[Any]:
    """Return the rewards of completions of a row whose answer is "1"; where there is none, the problem."""
    row = Row("d:0", "?", "1")
    scores = await grader.grade([Task(row, Completion(text), index) for index, text in enumerate(texts)])
    return [score.problem if score.value is None else score.value for score in scores]


async def test_a_request_given_up_while_the_environment_loads_leaves_the_process_to_the_next(world: World) -> None:
    world.gate.unlink()
    grader = world.grader()
    first = asyncio.create_task(graded(grader, "1"))
    await world.until(lambda: world.starts == 1)
    first.cancel()
    await asyncio.wait([first])
    assert first.cancelled()
    second = asyncio.create_task(graded(grader, "1", "2"))
    await asyncio.sleep(0)
    world.gate.touch()
    assert await second == [1.0, 0.0]
    assert world.starts == 1


async def test_an_environment_that_loads_longer_than_a_request_may_take_grades_a_later_one(world: World) -> None:
    world.gate.unlink()
    grader = world.grader(wait_s=0.2)
    for _ in range(2):
        (problem,) = await graded(grader, "1")
        assert "still being loaded" in problem
    world.gate.touch()
    child: Any = grader._child
    await world.until(lambda: not child.loading)
    grader._wait_s, grader._timeout_s = 60.0, 20.0
    assert await graded(grader, "1", "2") == [1.0, 0.0]
    assert world.starts == 1


async def test_an_environment_that_cannot_be_loaded_is_an_error_each_time(world: World) -> None:
    grader = world.grader("broken")
    for _ in range(2):
        assert await graded(grader, "1") == ["rubric: the grader's process ended without an answer"]


async def test_several_that_halt_their_process_hold_up_no_second_chance(world: World, impatient: None) -> None:
    grader = world.grader()
    grader._grace_s = 0.3
    *hanging, fine, wrong = await graded(grader, "hang", "hang", "hang", "1", "2")
    assert (fine, wrong) == (1.0, 0.0)
    assert all("in time" in problem for problem in hanging)


async def test_a_group_that_halts_its_process_alone_has_had_its_chance(world: World) -> None:
    grader = world.grader(timeout_s=0.1)
    grader._grace_s = 0.5
    assert await graded(grader, "hang") == ["rubric: the grader did not answer in time"]
    assert world.starts == 1
    grader._timeout_s = 20.0
    assert await graded(grader, "1") == [1.0]


async def test_a_process_that_hangs_ends_also_when_nobody_waits_for_it_any_more(world: World) -> None:
    grader = world.grader(wait_s=1.0)
    grader._wait_s = grader._timeout_s = 20.0
    assert await graded(grader, "1") == [1.0]
    grader._timeout_s = 0.2
    child: Any = grader._child
    given_up = asyncio.create_task(graded(grader, "hang"))
    await world.until(lambda: bool(child._groups))
    given_up.cancel()
    await world.until(lambda: child.gone)
    assert child._process.returncode is not None


@pytest.mark.parametrize("loading", [True, False])
async def test_closing_ends_every_process_whatever_it_does(world: World, loading: bool) -> None:
    if loading:
        world.gate.unlink()
    grader = world.grader()
    asking = asyncio.create_task(graded(grader, "1" if loading else "hang", "die"))
    await world.until(lambda: world.starts >= 1 if loading else any(child._groups for child in grader._all))
    children = list(grader._all)
    await grader.close()
    assert all(child.gone for child in children)
    assert all(isinstance(problem, str) for problem in await asking)
    assert await graded(grader, "1") == ["rubric: the grader's process ended without an answer"]
