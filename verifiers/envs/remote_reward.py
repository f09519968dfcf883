"""A reward function for TRL's trainers, whose grades are a dataserver's."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

from verifiers.data.sizes import check_size
from verifiers.envs.remote_grades import RemoteGrader, completion_for_wire
from verifiers.envs.remote_wire import RETRY_WAITS_S, Dataserver
from verifiers.errors import ConfigError, GradingError

__all__ = ["remote_reward"]

logger = logging.getLogger("verifiers.envs")


def remote_reward(
    url: str,
    *,
    token_var: str | None = None,
    timeout_s: float = 90.0,
    retry_waits_s: Sequence[float] = RETRY_WAITS_S,
    max_items: int = 256,
) -> Callable[..., list[float | None]]:
    """A reward function for TRL's trainers that has completions graded by a dataserver.

    What cannot be graded is None, which TRL leaves out of the group's statistics; it is never 0. Rows of a
    `RemoteRLDataset` say for which optimizer step they were drawn: where TRL trains them at another, the run ends.
    Its evaluations come at any step, so they cannot read a `RemoteRLDataset`: give `eval_dataset` rows with prompt
    and sample_id alone.

    Each device asks for the grades of its own completions: where per_device_train_batch_size times
    steps_per_generation is no multiple of num_generations, a grader that compares a group sees a part of it.

    Args:
        max_items: completions in one request; fewer where the server takes fewer.

    Raises (when it is called):
        ConfigError: TRL's sizes are not those that the dataset was given, it was resumed inside a block, or it
            evaluates over a `RemoteRLDataset`.
        GradingError: no completion could be graded, also after retries.
    """
    server = Dataserver(url, token_var, timeout_s, tuple(retry_waits_s))
    check_size("max_items", max_items, 1)

    @functools.cache
    def grader() -> RemoteGrader:
        return RemoteGrader(server, server.meta().limits, max_items)

    def remote_reward(
        completions: Sequence[Any], sample_id: Sequence[str], completion_ids: Any = None, **columns: Any
    ) -> list[float | None]:
        _check_step(columns.get("optimizer_step"), columns.get("trainer_state"))
        items = [
            {
                "sample_id": sample,
                "completion": completion_for_wire(completion),
                "completion_tokens": None if completion_ids is None else len(completion_ids[index]),
                "completion_index": index,
            }
            for index, (sample, completion) in enumerate(zip(sample_id, completions, strict=True))
        ]
        grades = grader().grades(items, _about(columns))
        failed = [grade.error for grade in grades if grade.reward is None]
        if failed:
            logger.warning("%d of %d completions have no reward; the first: %s", len(failed), len(grades), failed[0])
        if failed and len(failed) == len(grades):
            raise GradingError(f"none of {len(grades)} completions could be graded; the first: {failed[0]}")
        return [grade.reward for grade in grades]

    return remote_reward


def _about(columns: dict[str, Any]) -> dict[str, int]:
    """What the rows' columns say of all rows alike."""
    about = {}
    for name in ("optimizer_step", "generation_step", "seed"):
        values = set(columns.get(name) or ())
        if len(values) == 1 and isinstance(value := values.pop(), int):
            about[name] = value
    return about


def _check_step(drawn_for: Sequence[int] | None, trainer_state: Any) -> None:
    """TRL keeps nothing of where a block begins, so a step that is wrong once is wrong in all that follows."""
    step = getattr(trainer_state, "global_step", None)
    if not drawn_for or step is None or set(drawn_for) == {step}:
        return
    raise ConfigError(
        f"TRL generates for optimizer step {step} from rows that were drawn for step {min(drawn_for)}: in training, "
        "give RemoteRLDataset the sizes that TRL's GRPOConfig has, and resume from a checkpoint that was saved where "
        "a block ends; for evaluations, give TRL an eval_dataset of rows with prompt and sample_id alone, not a "
        "RemoteRLDataset."
    )
