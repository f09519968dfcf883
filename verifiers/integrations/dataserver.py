"""RemoteEnv: prompts and grades from a dataserver, which keeps the answers.

    env = RemoteEnv("http://127.0.0.1:9000")          # the server's curriculum
    env = RemoteEnv("http://127.0.0.1:9000", dataset="evaluation")

By name it is `verifiers.integrations.dataserver`: `vf-eval verifiers.integrations.dataserver -a '{"url": "..."}'`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.data.curriculum import Curriculum
from verifiers.data.row_source import PlannedBlock, StagedRows
from verifiers.envs.multiturn_env import SingleTurnEnv
from verifiers.errors import ConfigError, Error, GradingError
from verifiers.integrations.dataserver_client import (
    MAX_ATTEMPTS,
    Dataserver,
    Grade,
    RemoteGrader,
    ServerMeta,
    completion_for_wire,
    rank_of_process,
)
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.scoring import arguments_of
from verifiers.rubrics.shaping import completion_tokens
from verifiers.types import MessageType, RolloutScore, State

__all__ = ["RemoteEnv", "RemoteRows", "RemoteRubric", "load_environment"]

_PAGE = 512
_REMEMBERED_PARTS = 64


def load_environment(url: str, **options: Any) -> RemoteEnv:
    """Make the environment of a dataserver; see `RemoteEnv`."""
    return RemoteEnv(url, **options)


class RemoteEnv(SingleTurnEnv):
    """An environment of one answer to each prompt of a dataserver, graded there.

    Its rows are fetched when it is made. Without `dataset` and `stage` it has a `row_source`: the trainer then asks
    the server which rows each block trains on, by optimizer step and block.

    Args:
        url: of the dataserver, without a path.
        dataset: train and evaluate on these datasets of the server, in their own order, without its curriculum.
        stage: the same with the datasets of one stage of the curriculum.
        eval_dataset: datasets to evaluate on.
        seed: of the curriculum's draws, in place of the server's.
        token_var: environment variable that holds the server's bearer token.
        timeout_s: of one try of a request, in seconds; grades get ten more than the server gives its graders.
        max_attempts: tries of a request; then rollouts are grading errors.
        **kwargs: as in `Environment`, e.g. `sampling_args`; no rubric, for the server grades.

    Raises:
        ConfigError: the server has no such dataset or stage, or refuses; a rubric.
        InfraError: it cannot be reached.
    """

    not_in_workers = "its dataserver is told the step and the seed of each grade, which rank 0 alone knows"

    def __init__(
        self,
        url: str,
        *,
        dataset: str | Sequence[str] | None = None,
        stage: str | None = None,
        eval_dataset: str | Sequence[str] | None = None,
        seed: int | None = None,
        token_var: str | None = None,
        timeout_s: float = 90.0,
        max_attempts: int = MAX_ATTEMPTS,
        **kwargs: Any,
    ) -> None:
        for name in ("rubric", "message_type"):
            if name in kwargs:
                raise ConfigError(
                    f"a RemoteEnv was given {name}=, which the dataserver decides; leave it out, or set it in the "
                    "server's file."
                )
        server = Dataserver(url, token_var, timeout_s, max_attempts)
        meta = server.meta()
        names = _chosen(meta, dataset, stage)
        eval_names = _checked(meta, eval_dataset) if eval_dataset is not None else []
        rows = _fetched(server, meta, names)
        eval_rows = _fetched(server, meta, eval_names)
        source = RemoteRows(server, meta, rows, seed) if dataset is None and stage is None else None
        super().__init__(
            dataset=[row for of_dataset in rows.values() for row in of_dataset],
            eval_dataset=[row for of_dataset in eval_rows.values() for row in of_dataset] or None,
            rubric=RemoteRubric(RemoteGrader(server, meta.limits), source),
            message_type=_message_type([*rows.values(), *eval_rows.values()]),
            **kwargs,
        )
        self.server = server
        self.row_source = source


class RemoteRubric(Rubric):
    """A rubric of a dataserver's grades: the rollouts of a group in one request, when the group is complete.

    The reward is the server's, the metrics are its graders' scores. A completion that the server could not grade, and
    a whole group where it could not be reached, are failed grades.

    Args:
        source: what knows at which optimizer step a block is trained.
    """

    def __init__(self, grader: RemoteGrader, source: RemoteRows | None = None) -> None:
        super().__init__()
        self.grader = grader
        self.source = source

    @property
    def has_group_funcs(self) -> bool:
        """True, for a group is one request."""
        return True

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
        """Score rollouts by one request; as `Rubric.score_states`."""
        try:
            items = [_item(arguments_of(state), index) for index, state in enumerate(states)]
            grades = await self.grader.grades_async(items, self._about(states[0]))
        except Error as error:
            grades = [Grade(None, {}, str(error)) for _ in states]
        return [self._score(state, grade) for state, grade in zip(states, grades, strict=True)]

    def _about(self, state: State) -> dict[str, int]:
        """Return the block of a training rollout, and its step and seed where the server drew it."""
        client = state.get("client")
        if not isinstance(client, RolloutClient) or not isinstance(client.trains, tuple):
            return {}
        block_id, _ = client.trains
        known = self.source.drawn_for(block_id) if self.source is not None else {}
        return {"generation_step": block_id, **known}

    def _score(self, state: State, grade: Grade) -> RolloutScore:
        if grade.reward is None:
            self.record_failure("dataserver", [state], GradingError(grade.error or "no reward was given"))
            return RolloutScore(0.0)
        return RolloutScore(grade.reward, dict(grade.metrics))


class RemoteRows(StagedRows):
    """The rows of a block as the dataserver draws them.

    Args:
        rows: the environment's rows of each dataset, in the order of the environment's dataset.
        seed: in place of the curriculum's.
    """

    def __init__(
        self, server: Dataserver, meta: ServerMeta, rows: Mapping[str, Sequence[Any]], seed: int | None = None
    ) -> None:
        datasets: dict[str, range] = {}
        first = 0
        for name, of_dataset in rows.items():
            datasets[name] = range(first, first + len(of_dataset))
            first += len(of_dataset)
        curriculum = meta.curriculum if seed is None else dataclasses.replace(meta.curriculum, seed=seed)
        super().__init__(curriculum, datasets)
        self._server = server
        self._max_batch = meta.limits.max_batch
        self._known: dict[PlannedBlock, list[int]] = {}
        self._steps: dict[int, int] = {}

    def example_ids(self, block: PlannedBlock) -> list[int]:
        found = self._known.get(block)
        if found is None:
            found = []
            for body in sample_requests(block, self.curriculum, self._max_batch):
                found += map(self._example_id, self._server.samples(body))
            self._known[block], self._steps[block.block_id] = found, block.optimizer_step
            _forget_oldest(self._known)
            _forget_oldest(self._steps)
        return found

    def drawn_for(self, block_id: int) -> dict[str, int]:
        """Return the optimizer step and the seed with which a block was drawn; empty where it was not, here."""
        if block_id not in self._steps:
            return {}
        return {"optimizer_step": self._steps[block_id], "seed": self.curriculum.seed}

    def _example_id(self, sample: Mapping[str, Any]) -> int:
        name, _, row = str(sample["sample_id"]).rpartition(":")
        try:
            return self.datasets[name][int(row)]
        except (KeyError, ValueError, IndexError):
            raise ConfigError(
                f"the dataserver gave sample {sample['sample_id']!r}, which it did not have when this run began; "
                "start a new run, because its datasets have changed."
            ) from None


def _forget_oldest(remembered: dict[Any, Any]) -> None:
    if len(remembered) > _REMEMBERED_PARTS:
        remembered.pop(next(iter(remembered)))


def sample_requests(block: PlannedBlock, curriculum: Curriculum, most: int) -> Iterable[dict[str, Any]]:
    """Yield the bodies of /v2/sample for a block, each for at most `most` prompts."""
    for offset in range(0, block.prompts, most):
        yield {
            "optimizer_step": block.optimizer_step,
            "generation_step": block.block_id,
            "batch_size": min(most, block.prompts - offset),
            "seed": curriculum.seed,
            "rank": rank_of_process(),
            "prompts_per_block": block.prompts,
            "offset": offset,
            "first_blocks": curriculum.first_blocks(block.updates_per_block),
        }


def _chosen(meta: ServerMeta, dataset: str | Sequence[str] | None, stage: str | None) -> list[str]:
    if dataset is not None:
        if stage is not None:
            raise ConfigError(f"a RemoteEnv was given dataset={dataset!r} and stage={stage!r}; give one of them.")
        return _checked(meta, dataset)
    stages = {item.name: item for item in meta.curriculum.stages}
    if stage is not None and stage not in stages:
        raise ConfigError(f"the dataserver has no stage {stage!r}; it has {', '.join(stages)}.")
    chosen = stages.values() if stage is None else [stages[stage]]
    named = {of_stage.id for item in chosen for of_stage in item.datasets}
    return [name for name in meta.sizes if name in named]


def _checked(meta: ServerMeta, dataset: str | Sequence[str]) -> list[str]:
    names = [dataset] if isinstance(dataset, str) else list(dataset)
    for name in names:
        if name not in meta.sizes:
            raise ConfigError(f"the dataserver has no dataset {name!r}; it has {', '.join(meta.sizes)}.")
    return names


def _fetched(server: Dataserver, meta: ServerMeta, names: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    page = min(_PAGE, meta.limits.max_batch)
    return {name: [_row(sample) for sample in server.rows(name, page)] for name in names}


def _row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return a sample as an environment's row; the dataset's name is the task, by which metrics are split."""
    info = {"sample_id": sample["sample_id"], "metadata": sample.get("metadata") or {}}
    messages = sample.get("messages")
    return {
        "prompt": sample["prompt"] if messages is None else messages,
        "answer": "",
        "task": sample["dataset_id"],
        # as text, for one table cannot hold metadata of several kinds
        "info": json.dumps(info),
    }


def _message_type(datasets: Iterable[Sequence[Mapping[str, Any]]]) -> MessageType:
    kinds = {isinstance(row["prompt"], str) for rows in datasets for row in rows}
    if len(kinds) > 1:
        raise ConfigError(
            "some datasets of the dataserver have texts as prompts and some messages; choose those of one kind by "
            "dataset=."
        )
    return "completion" if kinds == {True} else "chat"


def _item(rollout: Mapping[str, Any], index: int) -> dict[str, Any]:
    sample_id = rollout["info"].get("sample_id")
    if not isinstance(sample_id, str):
        raise GradingError("the rollout's info has no sample_id; give a RemoteEnv its own rows")
    return {
        "sample_id": sample_id,
        "completion": completion_for_wire(rollout["completion"]),
        "completion_tokens": _tokens(rollout["state"]),
        "completion_index": index,
    }


def _tokens(state: State) -> int | None:
    try:
        return int(completion_tokens(state))
    except GradingError:
        # the length is unknown; a grader that needs it fails with a sentence
        return None
