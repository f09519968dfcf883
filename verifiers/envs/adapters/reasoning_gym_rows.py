"""Questions of reasoning-gym: which tasks, with which settings, and rows of them that never repeat.

Training and held-out questions never overlap, and the same arguments always give the same rows.
"""

from __future__ import annotations

import contextlib
import difflib
import io
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

__all__ = ["Entry", "GymTask", "Split", "draw_split", "gym_tasks", "open_dataset"]

Entry = dict[str, Any]
"""What reasoning-gym yields: question, answer, metadata."""

# entries beyond it come from another seed: some tasks refuse to be larger, and acre makes all its entries when opened
_CHUNK = 10_000
_SMALL_CHUNKS = {"acre": 500}
# standard output is the process's, so one thread at a time may turn it away
_QUIET = threading.Lock()
_SPEC_KEYS = ("name", "weight", "config", "curriculum")


@dataclass(frozen=True, slots=True)
class GymTask:
    """One reasoning-gym task within an environment.

    Attributes:
        name: the task's name in reasoning-gym.
        settings: the task's settings, curriculum levels applied; without seed and size.
        weight: how often it is drawn, in proportion to the other tasks' weights.
    """

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Split:
    """Rows of an environment: each the position of its task, and the entry."""

    train: list[tuple[int, Entry]]
    held_out: list[tuple[int, Entry]]


def gym_tasks(
    gym: str | Mapping[str, Any] | Sequence[Any],
    *,
    task_config: Mapping[str, Any] | None = None,
    curriculum: int | Mapping[str, int] | None = None,
) -> list[GymTask]:
    """The tasks that `gym` names, checked.

    Args:
        gym: the name of a task; or a list of names, of dicts {"name", "weight", "config", "curriculum"} and of
            reasoning-gym's own DatasetSpec.
        task_config, curriculum: settings and levels, where `gym` is one name.

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
    """The task as reasoning-gym's dataset.

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
    """The settings of a task's curriculum at a level; ranges reach from the lowest level to this one."""
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
) -> Split:
    """Draw `num_train` training and `num_eval` held-out entries, all with distinct questions.

    Only questions in which the regular expression `question_pattern` is found are drawn. Two questions that differ
    only in case or outer white space count as one. Held-out entries are drawn first, so they do not depend on
    `num_train`.

    Raises:
        ConfigError: a task has too few distinct questions.
    """
    if num_train < 0 or num_eval < 0 or num_train + num_eval == 0:
        raise ConfigError(f"num_train={num_train} and num_eval={num_eval} must be 0 or more, and not both 0.")
    held_out = _positions(tasks, num_eval, f"held-out:{seed}")
    train = _positions(tasks, num_train, f"train:{seed}")
    wanted = Counter(held_out + train)
    seen: set[str] = set()
    streams = [
        _Stream(task, _spread_seeds(tasks, position, seed), wanted[position], question_pattern, seen)
        for position, task in enumerate(tasks)
    ]
    # some tasks print while they work
    with _QUIET, contextlib.redirect_stdout(io.StringIO()):
        rows = [[(position, next(streams[position])) for position in part] for part in (held_out, train)]
    return Split(train=rows[1], held_out=rows[0])


def _positions(tasks: Sequence[GymTask], count: int, salt: str) -> list[int]:
    """Which task each row is of."""
    weights = [task.weight for task in tasks]
    return random.Random(salt).choices(range(len(tasks)), weights, k=count) if len(tasks) > 1 else [0] * count


def _spread_seeds(tasks: Sequence[GymTask], position: int, seed: int) -> Iterator[int]:
    """Seeds for one chunk of a task's entries after the other.

    reasoning-gym itself draws row i from `seed + i`, so that neighbouring seeds would give the same questions.
    """
    name = tasks[position].name
    earlier = sum(task.name == name for task in tasks[:position])
    root = f"{name}:{seed}" + (f"#{earlier}" if earlier else "")
    yield random.Random(root).getrandbits(32)
    chunk = 0
    while True:
        chunk += 1
        yield random.Random(f"{root}:{chunk}").getrandbits(32)


class _Stream:
    """A task's entries, without those whose question was seen before."""

    def __init__(self, task: GymTask, seeds: Iterator[int], wanted: int, pattern: str, seen: set[str]) -> None:
        self._task = task
        self._wanted = wanted
        self._given = 0
        self._attempts = 20 * wanted + 1000
        self._pattern = pattern
        self._seen = seen
        self._entries = self._all_entries(seeds)

    def _all_entries(self, seeds: Iterator[int]) -> Iterator[Entry]:
        drawn = 0
        chunk = _SMALL_CHUNKS.get(self._task.name, _CHUNK)
        for seed in seeds:
            dataset = open_dataset(self._task, seed=seed, size=chunk)
            for index in range(min(chunk, self._attempts - drawn)):
                yield dataset[index]
            drawn += chunk
            if drawn >= self._attempts:
                return

    def __next__(self) -> Entry:
        for entry in self._entries:
            question = entry["question"].strip().casefold()
            if question not in self._seen and re.search(self._pattern, entry["question"]):
                self._seen.add(question)
                self._given += 1
                return entry
        raise ConfigError(
            f"Task {self._task.name!r} gave {self._given} distinct questions in {self._attempts} draws, but the "
            f"training and held-out rows need {self._wanted}: ask for fewer, or widen task_config or "
            f"question_pattern ({self._pattern!r})."
        )
