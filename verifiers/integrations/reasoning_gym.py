"""ReasoningGymEnv: the tasks of reasoning-gym, scored by reasoning-gym's own scorers."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import itertools
import random
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verifiers.envs.multiturn_env import SingleTurnEnv
from verifiers.errors import ConfigError, GradingError, WorkerCallError, WorkerError, WorkerTimeoutError
from verifiers.integrations import reasoning_gym_worker
from verifiers.parsers.parser import Parser
from verifiers.parsers.xml_parser import XMLParser
from verifiers.rubrics.rubric import Rubric
from verifiers.types import Info, Messages, State

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

    from verifiers.sandbox.worker_pool import WorkerPool

Entry = dict[str, Any]
"""An item of reasoning-gym: question, answer, metadata."""

Row = tuple[int, Entry]
"""The position of a task among those of an environment, and an entry of it."""

# later entries come from another seed: some tasks refuse to be larger, and acre makes all entries when it is opened
_CHUNK = 10_000
_SMALL_CHUNKS = {"acre": 500}
# standard output is the process's, so one thread at a time may redirect it
_QUIET = threading.Lock()
_SPEC_KEYS = ("name", "weight", "config", "curriculum")


@dataclass(frozen=True, slots=True)
class GymTask:
    """One reasoning-gym task of an environment; its settings, curriculum levels applied, hold no seed and size."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0


def gym_tasks(
    gym: str | Mapping[str, Any] | Sequence[Any],
    *,
    task_config: Mapping[str, Any] | None = None,
    curriculum: int | Mapping[str, int] | None = None,
) -> list[GymTask]:
    """Return the tasks that `gym` names, checked; the arguments are those of `ReasoningGymEnv`."""
    if isinstance(gym, str):
        specs: list[Any] = [{"name": gym, "config": task_config, "curriculum": curriculum}]
    elif task_config is not None or curriculum is not None:
        raise ConfigError("task_config and curriculum go with one task; in a mix each task has its own config.")
    else:
        specs = [gym] if isinstance(gym, Mapping) else list(gym)
    if not specs:
        raise ConfigError("gym is empty: name at least one reasoning-gym task.")
    return [_task_of(spec) for spec in specs]


def _task_of(spec: Any) -> GymTask:
    if isinstance(spec, str):
        spec = {"name": spec}
    elif not isinstance(spec, Mapping):
        spec = {key: getattr(spec, key) for key in _SPEC_KEYS if hasattr(spec, key)}
    if "name" not in spec or spec.keys() - set(_SPEC_KEYS):
        raise ConfigError(f"A task of a mix is a name, or has the keys {', '.join(_SPEC_KEYS)}; got {spec!r}.")
    name, weight = spec["name"], spec.get("weight", 1.0)
    config = dict(spec.get("config") or {})
    if reserved := sorted({"seed", "size"} & config.keys()):
        raise ConfigError(f"task_config must not set {reserved}: give seed and the numbers of rows instead.")
    if not isinstance(weight, (int, float)) or isinstance(weight, bool) or not weight > 0:
        raise ConfigError(f"Task {name!r} has weight {weight!r}; it must be a number above 0.")
    _check_name(name)
    levels = spec.get("curriculum")
    settings = config if levels is None else {**_curriculum_settings(name, levels), **config}
    task = GymTask(name, settings, float(weight))
    open_dataset(task, seed=0, size=10)
    return task


def _check_name(name: Any) -> None:
    from reasoning_gym.factory import DATASETS

    if name == "composite":
        raise ConfigError("For a mix of tasks give a list of them instead of the task 'composite'.")
    if name not in DATASETS:
        near = difflib.get_close_matches(str(name), DATASETS, 3)
        raise ConfigError(f"reasoning-gym has no task {name!r}; the nearest names are {near or sorted(DATASETS)}.")


def open_dataset(task: GymTask, *, seed: int, size: int) -> ProceduralDataset:
    """Open the task as reasoning-gym's dataset. Raises ConfigError where reasoning-gym refuses the settings."""
    import reasoning_gym

    try:
        return reasoning_gym.create_dataset(task.name, seed=seed, size=size, **task.settings)
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"reasoning-gym refuses task {task.name!r} with settings {dict(task.settings)!r}: {error}"
        ) from error


def _curriculum_settings(name: str, levels: int | Mapping[str, int]) -> dict[str, Any]:
    """Return a task's settings at a level of its curriculum; ranges reach from the lowest level to this one."""
    import reasoning_gym.factory as factory
    from reasoning_gym.coaching.attributes import RangeAttributeDefinition

    if not factory.has_curriculum(name):
        raise ConfigError(f"Task {name!r} has no curriculum in reasoning-gym; set its task_config instead.")
    curriculum = factory.create_curriculum(name)
    attributes = curriculum.attributes
    try:
        if isinstance(levels, Mapping):
            for attribute, level in levels.items():
                curriculum.set_attr_level(attribute, level)
        else:
            curriculum.set_global_level(levels)
    except (KeyError, TypeError, ValueError) as error:
        known = {attribute: f"0..{len(definition.levels) - 1}" for attribute, definition in attributes.items()}
        raise ConfigError(f"Task {name!r} cannot take curriculum={levels!r}; its levels are {known}.") from error
    config = curriculum.generate_configuration()
    fields: list[str] = []
    for attribute in attributes.values():
        if isinstance(attribute, RangeAttributeDefinition):
            fields += [attribute.lower_field_name, attribute.upper_field_name]
        else:
            fields.append(attribute.field_name)
    return {name: getattr(config, name) for name in fields}


def draw_split(
    tasks: Sequence[GymTask], *, num_train: int, num_eval: int, seed: int, question_pattern: str = ""
) -> tuple[list[Row], list[Row]]:
    """Draw `num_train` training and `num_eval` evaluation rows, all with distinct questions; return both.

    Only questions in which the regular expression `question_pattern` is found are drawn. Two questions that differ
    only in case or outer white space count as one. Evaluation rows are drawn first, so they do not depend on
    `num_train`. Raises ConfigError where a task has too few distinct questions.
    """
    if num_train < 0 or num_eval < 0 or num_train + num_eval == 0:
        raise ConfigError(f"num_train={num_train} and num_eval={num_eval} must be 0 or more, and not both 0.")
    evaluation = _positions(tasks, num_eval, f"held-out:{seed}")
    train = _positions(tasks, num_train, f"train:{seed}")
    wanted = Counter(evaluation + train)
    seen: set[str] = set()
    streams = [
        _distinct_entries(task, _spread_seeds(tasks, position, seed), wanted[position], question_pattern, seen)
        for position, task in enumerate(tasks)
    ]
    # some tasks print while they work
    with _QUIET, contextlib.redirect_stdout(io.StringIO()):
        rows = [[(position, next(streams[position])) for position in part] for part in (evaluation, train)]
    return rows[1], rows[0]


def _positions(tasks: Sequence[GymTask], count: int, salt: str) -> list[int]:
    weights = [task.weight for task in tasks]
    return random.Random(salt).choices(range(len(tasks)), weights, k=count) if len(tasks) > 1 else [0] * count


def _spread_seeds(tasks: Sequence[GymTask], position: int, seed: int) -> Iterator[int]:
    """Yield a seed for each chunk of a task's entries.

    reasoning-gym itself draws row i from `seed + i`, so that neighbouring seeds would give the same questions.
    """
    name = tasks[position].name
    earlier = sum(task.name == name for task in tasks[:position])
    root = f"{name}:{seed}" + (f"#{earlier}" if earlier else "")
    yield random.Random(root).getrandbits(32)
    for chunk in itertools.count(1):
        yield random.Random(f"{root}:{chunk}").getrandbits(32)


def _distinct_entries(
    task: GymTask, seeds: Iterator[int], wanted: int, pattern: str, seen: set[str]
) -> Iterator[Entry]:
    """Yield a task's entries that match the pattern, without those whose question is in `seen`."""
    attempts, given = 20 * wanted + 1000, 0
    chunk = _SMALL_CHUNKS.get(task.name, _CHUNK)
    for drawn in range(0, attempts, chunk):
        dataset = open_dataset(task, seed=next(seeds), size=chunk)
        for index in range(min(chunk, attempts - drawn)):
            entry = dataset[index]
            question = entry["question"].strip().casefold()
            if question not in seen and re.search(pattern, entry["question"]):
                seen.add(question)
                given += 1
                yield entry
    raise ConfigError(
        f"Task {task.name!r} gave {given} distinct questions in {attempts} draws, but the training and evaluation "
        f"rows need {wanted}: ask for fewer, or widen task_config or question_pattern ({pattern!r})."
    )


DEFAULT_SYSTEM_PROMPT = (
    "Think about the problem step by step. Then give the final answer, and nothing but it, between <answer> and "
    "</answer>. Where the problem shows an example, write the answer in exactly that form."
)


class ReasoningGymEnv(SingleTurnEnv):
    """Single-turn questions of one reasoning-gym task or a weighted mix of them.

    Questions are drawn when the environment is made; the same arguments give the same rows. All are distinct, so
    no evaluation question is a training question, and those do not depend on `num_train_examples`.
    Scorers that do more with an answer than compare it run in worker processes with limits of time and memory.

    Args:
        gym: the name of a task, or a list of names, of dicts {"name", "weight", "config", "curriculum"}, and of
            reasoning-gym's DatasetSpec.
        num_train_examples: training rows; 0 for none.
        num_eval_examples: evaluation rows; 0 for none.
        system_prompt: put before each question; None for none.
        parser: finds the answer in a completion. Default: `XMLParser(["answer"])`.
        seed: chooses the questions.
        task_config: settings of the task, such as {"min_word_len": 3}; only where `gym` is one name.
        curriculum: level of the task's curriculum, for all attributes (an int, at most each one's highest), or for
            some by name (the others stay at their lowest); only where `gym` is one name. `task_config` wins.
        question_pattern: regular expression to be found in a question, else it is left out.
        reward: which of the metrics `score` and `exact_match` is the reward.
        scoring_timeout_s: seconds a scorer may take in a worker process; an answer that takes longer scores 0.
        num_samples, num_eval_samples: older names of `num_train_examples` and `num_eval_examples`.

    Raises:
        ConfigError: an argument cannot work; the message says which and why.
    """

    def __init__(
        self,
        gym: str | Mapping[str, Any] | Sequence[Any],
        num_train_examples: int = 1000,
        num_eval_examples: int = 100,
        system_prompt: str | None = DEFAULT_SYSTEM_PROMPT,
        parser: Parser | None = None,
        seed: int = 0,
        *,
        task_config: Mapping[str, Any] | None = None,
        curriculum: int | Mapping[str, int] | None = None,
        question_pattern: str = "",
        reward: Literal["score", "exact"] = "score",
        scoring_timeout_s: float = 10.0,
        num_samples: int | None = None,
        num_eval_samples: int | None = None,
        **kwargs: Any,
    ) -> None:
        if reward not in ("score", "exact"):
            raise ConfigError(f"reward={reward!r} is unknown: choose 'score' or 'exact'.")
        self.gym = gym
        self.num_train_examples = num_train_examples if num_samples is None else num_samples
        self.num_eval_examples = num_eval_examples if num_eval_samples is None else num_eval_samples
        self.seed = seed
        self.gym_tasks = gym_tasks(gym, task_config=task_config, curriculum=curriculum)
        train, evaluation = draw_split(
            self.gym_tasks,
            num_train=self.num_train_examples,
            num_eval=self.num_eval_examples,
            seed=seed,
            question_pattern=question_pattern,
        )
        parser = parser if parser is not None else XMLParser(fields=["answer"])
        super().__init__(
            dataset=_rows(self.gym_tasks, train),
            eval_dataset=_rows(self.gym_tasks, evaluation),
            system_prompt=system_prompt,
            parser=parser,
            rubric=ReasoningGymRubric(
                [(task.name, reasoning_gym_worker.dumps(dict(task.settings))) for task in self.gym_tasks],
                [compares_text(task.name) for task in self.gym_tasks],
                reward=reward,
                parser=parser,
                timeout_s=scoring_timeout_s,
            ),
            **kwargs,
        )


def _rows(tasks: Sequence[GymTask], entries: Sequence[tuple[int, Entry]]) -> list[dict[str, Any]] | None:
    """Return rows of question, answer and info; None for no rows.

    `info["entry"]` holds the whole entry as text, because Arrow would give every row the union of all rows'
    metadata keys; scorers compare with the tuples and sets in it.
    """
    if not entries:
        return None
    return [
        {
            "question": entry["question"],
            # some tasks have many right answers and give none
            "answer": "" if entry["answer"] is None else str(entry["answer"]),
            "info": {"gym": position, "task": tasks[position].name, "entry": reasoning_gym_worker.dumps(entry)},
        }
        for position, entry in entries
    ]


# -- scoring ---------------------------------------------------------------------------------------------------

_COMPARING = """
    ab circuit_logic color_cube_rotation dice emoji_mystery family_relationships figlet_font futoshiki mini_sudoku
    needle_haystack palindrome_generation path_star self_reference sentence_reordering spell_backward sudoku tsumego
    word_sorting zebra_puzzles
"""
COMPARING_TASKS = frozenset(_COMPARING.split())
"""Tasks with a scorer of their own that only compares text: no eval, no parser, no simulation."""

SCORING_MEMORY_BYTES = 1 << 30

_SCORE = f"{reasoning_gym_worker.__name__}:score_in_worker"
_STATE_KEY = "reasoning_gym_verdict"


@dataclass(frozen=True, slots=True)
class ScorerResult:
    """The scorer's result for one answer; `killed` where it was stopped at its limit of time or memory."""

    answer: str | None
    score: float
    killed: bool = False
    raised: str = ""


def compares_text(name: str) -> bool:
    """Return whether a task's scorer only compares text, so that it may run in the calling process."""
    from reasoning_gym.dataset import ProceduralDataset
    from reasoning_gym.factory import DATASETS

    return name in COMPARING_TASKS or DATASETS[name][0].score_answer is ProceduralDataset.score_answer


@functools.cache
def scoring_pool() -> WorkerPool:
    """Return the process's one pool of scoring processes; they start at the first score."""
    from verifiers.sandbox.worker_pool import WorkerPool

    return WorkerPool(
        memory_bytes=SCORING_MEMORY_BYTES,
        preload=("reasoning_gym", reasoning_gym_worker.__name__),
        name="reasoning-gym",
    )


class ReasoningGymRubric(Rubric):
    """A rubric of reasoning-gym's score of the parsed answer, and metrics about it.

    Metrics: `score`, in most tasks 0 .. 1, with partial credit; `exact_match`, 1 where the score is exactly 1; and
    where a task is scored in a worker process, `scoring_timeout`, 1 where the scorer was killed at its limit of time
    or memory, and `scorer_raised`, 1 where this answer made it raise. Both of these score 0: the answer is the cause.
    A worker that fails for another reason is a failed grade.

    Args:
        tasks: name and settings (as text of `dumps`) of each task; `info["gym"]` is the place of a row's task.
        in_process: which of them are scored in the calling process.
    """

    def __init__(
        self,
        tasks: Sequence[tuple[str, str]],
        in_process: Sequence[bool],
        *,
        reward: Literal["score", "exact"],
        parser: Parser,
        timeout_s: float,
    ) -> None:
        functions: dict[str, Callable[..., Any]] = {
            "score": self._value(lambda verdict: verdict.score),
            "exact_match": self._value(lambda verdict: verdict.score == 1.0),
        }
        if not all(in_process):
            functions["scoring_timeout"] = self._value(lambda verdict: verdict.killed)
            functions["scorer_raised"] = self._value(lambda verdict: verdict.raised != "")
        for name, function in functions.items():
            function.__name__ = name
        counts = "score" if reward == "score" else "exact_match"
        weights = [1.0 if name == counts else 0.0 for name in functions]
        # one after the other: the first scores, the others read its result in the state
        super().__init__(funcs=list(functions.values()), weights=weights, parser=parser, parallelize_scoring=False)
        self.tasks = list(tasks)
        self.in_process = list(in_process)
        self.timeout_s = timeout_s

    def _value(self, read: Callable[[ScorerResult], float]) -> Callable[..., Any]:
        async def value(completion: Messages, info: Info, state: State) -> float:
            parsed = self.parser.parse_answer(completion)
            answer = None if parsed is None else str(parsed).strip()
            verdict = state.get(_STATE_KEY)
            if not isinstance(verdict, ScorerResult) or verdict.answer != answer:
                verdict = state[_STATE_KEY] = await self._verdict(answer, info)
            return float(read(verdict))

        return value

    async def _verdict(self, answer: str | None, info: Info) -> ScorerResult:
        position = int(info.get("gym", 0))
        name, settings = self.tasks[position]
        arguments = (name, settings, info["entry"], answer)
        if self.in_process[position]:
            result = reasoning_gym_worker.score(*arguments)
            if result["raised"]:
                # a scorer that only compares takes any text, so the answer is not the cause
                raise GradingError(f"The scorer of task {name!r} raised {result['raised']}.")
            return ScorerResult(answer, result["score"])
        try:
            result = await scoring_pool().call(_SCORE, *arguments, timeout_s=self.timeout_s)
        except WorkerTimeoutError:
            return ScorerResult(answer, 0.0, killed=True)
        except WorkerCallError as error:
            if error.kind != "MemoryError":
                raise
            return ScorerResult(answer, 0.0, killed=True)
        except WorkerError as error:
            await self._check_empty_answer(error, arguments)
            return ScorerResult(answer, 0.0, killed=True)
        raised = str(result["raised"])
        return ScorerResult(answer, float(result["score"]), killed=raised == "MemoryError", raised=raised)

    async def _check_empty_answer(self, error: WorkerError, arguments: tuple[str, str, str, str | None]) -> None:
        """Raise GradingError unless an empty answer can be scored: then the answer ended the worker."""
        try:
            await scoring_pool().call(_SCORE, *arguments[:3], "", timeout_s=self.timeout_s)
        except WorkerError:
            raise GradingError(f"The scorer of task {arguments[0]!r} cannot run in a worker: {error}") from error
