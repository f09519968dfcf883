"""Graders: each takes completions and gives for every one a score, or the reason why there is none.

Nothing here raises for what a grader or a completion does: a failure is a `Score` with a problem. Problems
name the grader and the kind of error, never its message, for that may quote the row's answer; the full
text is in the log.
"""

from __future__ import annotations

import abc
import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from verifiers.concurrency import gather_owned, threads_for
from verifiers.errors import ConfigError, Error, GradingError, WorkerCallError, WorkerTimeoutError
from verifiers.rubrics.math_rubric import MathVerdict, math_verdict
from verifiers.rubrics.scoring import finite_float
from verifiers.sandbox.worker_pool import WorkerPool
from verifiers_dataserver.scores import Score, Scorer
from verifiers_dataserver.tasks import Completion, Row, answer_part

if TYPE_CHECKING:
    import aiohttp

log = logging.getLogger("verifiers_dataserver")

INLINE_CHARS = 20_000
"""Longest completion that a linear grader looks at on the event loop: well below a millisecond."""

_TURN_ITEMS, _TURN_CHARS = 64, 200_000


@dataclass(frozen=True, slots=True)
class Task:
    """One completion to grade. `index` is its place in the request."""

    row: Row
    completion: Completion
    index: int


class Grader(abc.ABC):
    """A grader of completions of one dataset."""

    @abc.abstractmethod
    async def grade(self, tasks: Sequence[Task]) -> list[Score]:
        """Return a score for each task, in order."""

    async def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what it runs of its own; pools belong to those who made them."""


class BuiltinGrader(Grader):
    """A function of `scores`: on the event loop by slices, or in a thread or worker where it may take long.

    Args:
        key: its name among the built-in ones.
        pool: where those run that may never end.
        wait_s: seconds that one completion may take there, waiting included.
    """

    def __init__(self, name: str, key: str, scorer: Scorer, pool: WorkerPool, wait_s: float) -> None:
        self._name, self._key, self._scorer, self._pool, self._wait_s = name, key, scorer, pool, wait_s

    async def grade(self, tasks: Sequence[Task]) -> list[Score]:
        if self._scorer.in_worker:
            return await each(self._name, self._by_worker, tasks, self._wait_s)
        scores = []
        items = chars = 0
        for task in tasks:
            length = len(task.completion.text)
            if length > INLINE_CHARS:
                work = threads_for("grader", 4).run(functools.partial(self._score, task))
                scores.append(await work)
                continue
            scores.append(self._score(task))
            items, chars = items + 1, chars + length
            if items >= _TURN_ITEMS or chars >= _TURN_CHARS:
                # other requests get their turn
                await asyncio.sleep(0)
                items = chars = 0
        return scores

    def _score(self, task: Task) -> Score:
        try:
            return Score(self._scorer.score(task.completion, task.row))
        except GradingError as error:
            return Score(problem=f"{self._name}: {error}")
        except Exception as error:
            return failed(self._name, error)

    async def _by_worker(self, task: Task) -> Score:
        answer = await self._pool.call(
            "verifiers_dataserver.grading.worker_functions:score_in_worker",
            self._key,
            asdict(self._scorer),  # type: ignore[call-overload]
            asdict(task.completion),
            asdict(task.row),
        )
        if "missing" in answer:
            return Score(problem=f"{self._name}: {answer['missing']}")
        return Score(float(answer["score"]))


class MathGrader(Grader):
    """Answers compared as mathematics: by their text, or by math-verify in workers."""

    def __init__(self, name: str, answer_from: str, timeout_s: float, wait_s: float) -> None:
        self._name, self._answer_from, self._timeout_s, self._wait_s = name, answer_from, timeout_s, wait_s

    async def grade(self, tasks: Sequence[Task]) -> list[Score]:
        return await each(self._name, self._compare, tasks, self._wait_s)

    async def _compare(self, task: Task) -> Score:
        text, how = task.completion.text, self._answer_from
        if len(text) > INLINE_CHARS:
            answer = await threads_for("grader", 4).run(lambda: answer_part(text, how))
        else:
            answer = answer_part(text, how)
        verdict = await math_verdict(task.row.answer, answer, timeout_s=self._timeout_s)
        if verdict in (MathVerdict.TIMED_OUT, MathVerdict.DIED):
            return Score(problem=f"{self._name}: the comparison {verdict.value.replace('_', ' ')}")
        return Score(float(verdict is MathVerdict.RIGHT))


class PythonGrader(Grader):
    """A function of the user, called in a sandboxed worker process for each completion.

    Args:
        target: "module:function".
        options: further keyword arguments.
        pool: its own, so that one that hangs holds up nobody else.
        wait_s: seconds that one completion may take, waiting for a free worker included.
    """

    def __init__(
        self,
        name: str,
        target: str,
        options: Mapping[str, Any],
        answer_from: str,
        pool: WorkerPool,
        wait_s: float,
    ) -> None:
        self._name, self._target, self._options = name, target, dict(options)
        self._answer_from, self._pool, self._wait_s = answer_from, pool, wait_s

    async def grade(self, tasks: Sequence[Task]) -> list[Score]:
        return await each(self._name, self._call, tasks, self._wait_s)

    async def _call(self, task: Task) -> Score:
        row = task.row
        given = {
            "prompt": row.prompt,
            "completion": task.completion.as_messages(),
            "text": task.completion.text,
            "completion_tokens": task.completion.tokens,
            "answer": row.answer,
            "info": dict(row.info),
            "task": row.task,
            "answer_from": self._answer_from,
        }
        function = "verifiers_dataserver.grading.worker_functions:call_grader"
        return score_of(self._name, await self._pool.call(function, self._target, given, self._options))


class HttpGrader(Grader):
    """A grader behind a URL: one POST for all completions of a request.

    It gets {"samples": [{sample_id, completion_index, prompt, system_prompt, answer, metadata, completion,
    completion_tokens}]} and answers {"results": [{completion_index, reward}]}; results without
    completion_index are joined on sample_id where no two samples share one.
    """

    def __init__(self, name: str, url: str, timeout_s: float, token: str | None) -> None:
        self._name, self._url, self._timeout_s, self._token = name, url, timeout_s, token
        self._session: aiohttp.ClientSession | None = None

    async def grade(self, tasks: Sequence[Task]) -> list[Score]:
        try:
            data = await self._post({"samples": [_sample(task) for task in tasks]})
            results = data["results"]
            if not isinstance(results, list):
                raise TypeError("results is not a list")
        except Exception as error:
            failure = failed(self._name, error)
            return [failure for _ in tasks]
        return self._joined(tasks, results)

    def _joined(self, tasks: Sequence[Task], results: list[Any]) -> list[Score]:
        by_index: dict[float, Any] = {}
        by_sample: dict[str, Any] = {}
        for result in results:
            if not isinstance(result, Mapping):
                continue
            index, sample = result.get("completion_index"), result.get("sample_id")
            if isinstance(index, (int, float)) and not isinstance(index, bool):
                by_index.setdefault(index, result.get("reward"))
            if isinstance(sample, str):
                by_sample.setdefault(sample, result.get("reward"))
        shared = Counter(task.row.sample_id for task in tasks)
        scores = []
        for task in tasks:
            sample = task.row.sample_id
            if task.index in by_index:
                scores.append(score_of(self._name, by_index[task.index]))
            elif shared[sample] == 1 and sample in by_sample:
                scores.append(score_of(self._name, by_sample[sample]))
            else:
                problem = f"{self._name}: the grader's answer has no result for this completion"
                scores.append(Score(problem=problem))
        return scores

    async def _post(self, body: dict[str, Any]) -> Any:
        import aiohttp

        if self._session is None:
            headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
            timeout = aiohttp.ClientTimeout(total=self._timeout_s)
            self._session = aiohttp.ClientSession(timeout=timeout, headers=headers)
        # a redirection would carry the rows' answers, and perhaps the token, to somebody else
        async with self._session.post(self._url, json=body, allow_redirects=False) as response:
            response.raise_for_status()
            if response.status >= 300:
                raise ValueError(f"{self._url} answered with status {response.status}")
            return await response.json(content_type=None)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.close()


def _sample(task: Task) -> dict[str, Any]:
    system_prompt, prompt = split_prompt(task.row.prompt)
    return {
        "sample_id": task.row.sample_id,
        "completion_index": task.index,
        "prompt": prompt if prompt is not None else task.row.prompt,
        "system_prompt": system_prompt,
        "answer": task.row.answer,
        "metadata": dict(task.row.info),
        "completion": task.completion.text,
        "completion_tokens": task.completion.tokens,
    }


def split_prompt(prompt: list[dict[str, Any]] | str) -> tuple[str | None, str | None]:
    """Return (system prompt, user's prompt) of a prompt; the second is None where there is more than these."""
    if isinstance(prompt, str):
        return None, prompt
    system: str | None = None
    rest = list(prompt)
    if rest and rest[0].get("role") == "system" and isinstance(rest[0].get("content"), str):
        system = rest.pop(0)["content"]
    plain = len(rest) == 1 and rest[0].get("role") == "user" and isinstance(rest[0].get("content"), str)
    return system, rest[0]["content"] if plain else None


async def each(
    name: str, grade: Callable[[Task], Awaitable[Score]], tasks: Sequence[Task], wait_s: float
) -> list[Score]:
    """Grade tasks side by side, each by itself and in `wait_s` seconds: one that fails is its own failure alone."""

    async def one(task: Task) -> Score:
        try:
            async with asyncio.timeout(wait_s):
                return await grade(task)
        except Exception as error:
            return failed(name, error)

    return await gather_owned([one(task) for task in tasks])


def score_of(name: str, value: Any) -> Score:
    try:
        return Score(finite_float(value))
    except GradingError:
        return Score(problem=f"{name}: the grader gave no finite number")


def failed(name: str, error: Exception) -> Score:
    """Return the score of a grader that raised; the error's text goes to the log alone."""
    log.warning("the grader %r failed: %s: %s", name, type(error).__name__, error)
    if isinstance(error, (WorkerTimeoutError, TimeoutError)):
        return Score(problem=f"{name}: the grader did not answer in time")
    if isinstance(error, WorkerCallError):
        return Score(problem=f"{name}: the grader raised {error.kind}")
    if isinstance(error, ConfigError) or not isinstance(error, Error):
        return Score(problem=f"{name}: the grader failed with {type(error).__name__}")
    return Score(problem=f"{name}: the grader's process ended without an answer")
