"""Questions of reasoning-gym: tasks with their settings, and rows of them that never repeat.

Training and evaluation questions never overlap, and the same arguments always give the same rows.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import itertools
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset

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
    """One reasoning-gym task within an environment.

    Attributes:
        name: the task's name in reasoning-gym.
        settings: the task's settings, curriculum levels applied; without seed and size.
        weight: share of the rows, relative to the other tasks' weights.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0


def gym_tasks(
    gym: str | Mapping[str, Any] | Sequence[Any],
    *,
    task_config: Mapping[str, Any] | None = None,
    curriculum: int | Mapping[str, int] | None = None,
) -> list[GymTask]:
    """Return the tasks that `gym` names, checked.

    Args:
        gym: the name of a task; or a list of names, of dicts {"name", "weight", "config", "curriculum"} and of
            reasoning-gym's own DatasetSpec.
        task_config: settings, where `gym` is one name.
        curriculum: levels, where `gym` is one name.

    Raises:
        ConfigError: a task is unknown, a level does not exist, or reasoning-gym refuses the settings.
    """
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
    """Open the task as reasoning-gym's dataset.

    Raises:
        ConfigError: reasoning-gym refuses the settings.
    """
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
    """Draw `num_train` training and `num_eval` evaluation rows, all with distinct questions.

    Only questions in which the regular expression `question_pattern` is found are drawn. Two questions that differ
    only in case or outer white space count as one. Evaluation rows are drawn first, so they do not depend on
    `num_train`.

    Returns:
        The training rows and the evaluation rows.

    Raises:
        ConfigError: a task has too few distinct questions.
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
    """Choose the task of each row."""
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
    """Yield a task's entries that match the pattern, without those whose question is in `seen`.

    Raises:
        ConfigError: there are too few.
    """
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
