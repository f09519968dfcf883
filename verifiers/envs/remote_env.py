"""RemoteEnv: prompts and grades from a dataserver, which keeps the answers to itself.

    env = RemoteEnv("http://127.0.0.1:9000")          # the server's curriculum
    env = RemoteEnv("http://127.0.0.1:9000", dataset="held_out")

By name it is `verifiers.envs.remote_env`, for example `vf-eval verifiers.envs.remote_env -a '{"url": "..."}'`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from verifiers.data.source import BlockPart
from verifiers.data.staged import StagedRows
from verifiers.envs.remote_grades import Grade, RemoteGrader, completion_for_wire
from verifiers.envs.remote_wire import RETRY_WAITS_S, Dataserver, ServerMeta, rank_of_process
from verifiers.envs.singleturn_env import SingleTurnEnv
from verifiers.errors import ConfigError, Error, GradingError
from verifiers.rollouts.client import RolloutClient
from verifiers.rubrics.overlong import completion_tokens
from verifiers.rubrics.rows import Row
from verifiers.rubrics.rubric import Rubric
from verifiers.types import MessageType, RolloutScore, State

__all__ = ["RemoteEnv", "RemoteRows", "RemoteRubric", "load_environment"]

_PAGE = 512
_REMEMBERED_PARTS = 64


def load_environment(url: str, **options: Any) -> RemoteEnv:
    """The environment behind a dataserver; see `RemoteEnv`."""
    return RemoteEnv(url, **options)


class RemoteEnv(SingleTurnEnv):
    """One answer to each prompt of a dataserver, graded there.

    Its rows are fetched when it is made. Without `dataset` and `stage` it has a `row_source`: the trainer then asks
    the server which rows each block trains on, by optimizer step and block.

    Args:
        url: of the dataserver, without a path.
        dataset: train and evaluate on these datasets of the server, in their own order, whatever its curriculum says.
        stage: the same with the datasets of one stage of the curriculum.
        eval_dataset: held-out datasets.
        seed: of the curriculum's draws, in place of the server's.
        token_var: environment variable that holds the server's bearer token.
        timeout_s: of one try of a request, in seconds; grades get ten more than the server gives its graders.
        retry_waits_s: seconds before each repetition of a request; then rollouts are grading errors.
        **kwargs: as in `Environment`, e.g. `sampling_args`; no rubric, for the server grades.

    Raises:
        ConfigError: the server has no such dataset or stage, or refuses; a rubric.
        InfraError: it cannot be reached.
    """

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
        retry_waits_s: Sequence[float] = RETRY_WAITS_S,
        **kwargs: Any,
    ) -> None:
        for name in ("rubric", "message_type"):
            if name in kwargs:
                raise ConfigError(
                    f"a RemoteEnv was given {name}=, which the dataserver decides; leave it out, or set it in the "
                    "server's file."
                )
        server = Dataserver(url, token_var, timeout_s, tuple(retry_waits_s))
        meta = server.meta()
        names = _chosen(meta, dataset, stage)
        held_out = _checked(meta, eval_dataset) if eval_dataset is not None else []
        rows = _fetched(server, meta, names)
        eval_rows = _fetched(server, meta, held_out)
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
    """Grades by a dataserver: the rollouts of a group in one request, as soon as the group is complete.

    The reward is the server's, the metrics are its graders' scores. A completion that the server could not grade, and
    a whole group where it could not be reached, are failed grades.

    Args:
        grader: asks the dataserver.
        source: what knows at which optimizer step a block is trained.
    """

    def __init__(self, grader: RemoteGrader, source: RemoteRows | None = None) -> None:
        super().__init__()
        self.grader = grader
        self.source = source

    @property
    def has_group_funcs(self) -> bool:
        """True: a group is one request."""
        return True

    async def _group_scores(self, rows: Sequence[Row], score_sem: Any) -> list[RolloutScore]:
        try:
            items = [_item(row, index) for index, row in enumerate(rows)]
            grades = await self.grader.grades_async(items, self._about(rows[0]))
        except Error as error:
            grades = [Grade(None, {}, str(error)) for _ in rows]
        return [self._score(row, grade) for row, grade in zip(rows, grades, strict=True)]

    async def _single_score(self, row: Row, score_sem: Any, extra: Mapping[str, Any]) -> RolloutScore:
        return (await self._group_scores([row], score_sem))[0]

    def _about(self, row: Row) -> dict[str, int]:
        """Which block of a training run a rollout is of, and its step and seed where the server drew it."""
        client = row.state.get("client")
        if not isinstance(client, RolloutClient) or not isinstance(client.trains, tuple):
            return {}
        block_id, example_id = client.trains
        known = self.source.drawn_for(block_id, example_id) if self.source is not None else {}
        return {"generation_step": block_id, **known}

    def _score(self, row: Row, grade: Grade) -> RolloutScore:
        if grade.reward is None:
            self._record_failure("dataserver", [row.state], GradingError(grade.error or "no reward was given"))
            return RolloutScore(0.0)
        return RolloutScore(grade.reward, dict(grade.metrics))


class RemoteRows(StagedRows):
    """The rows of a block as the dataserver draws them.

    Args:
        server: the dataserver.
        meta: its stages.
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
        self._known: dict[BlockPart, list[int]] = {}
        self._steps: dict[int, dict[int, int]] = {}

    def example_ids(self, part: BlockPart) -> list[int]:
        found = self._known.get(part)
        if found is None:
            found = []
            for body in sample_requests(part, self.curriculum.seed, self._max_batch):
                found += map(self._example_id, self._server.samples(body))
            # replaced and never changed: rubrics look here from the generator's thread
            steps = {**self._steps.get(part.block_id, {}), **dict.fromkeys(found, part.optimizer_step)}
            self._known[part], self._steps[part.block_id] = found, steps
            _forget_oldest(self._known)
            _forget_oldest(self._steps)
        return found

    def drawn_for(self, block_id: int, example_id: int) -> dict[str, int]:
        """The optimizer step and the seed with which a prompt of a block was drawn; empty where it was not, here."""
        steps = self._steps.get(block_id)
        if not steps:
            return {}
        # a prompt that replaces another is of the block's only stage
        return {"optimizer_step": steps.get(example_id, min(steps.values())), "seed": self.curriculum.seed}

    def _example_id(self, sample: Mapping[str, Any]) -> int:
        name, _, row = str(sample["sample_id"]).rpartition(":")
        try:
            return self.datasets[name][int(row)]
        except (KeyError, ValueError, IndexError):
            raise ConfigError(
                f"the dataserver gave sample {sample['sample_id']!r}, which it did not have when this run began; "
                "start the run anew, for its datasets have changed."
            ) from None


def _forget_oldest(remembered: dict[Any, Any]) -> None:
    if len(remembered) > _REMEMBERED_PARTS:
        remembered.pop(next(iter(remembered)))


def sample_requests(part: BlockPart, seed: int, most: int) -> Iterable[dict[str, Any]]:
    """The bodies of /v2/sample for a part of a block, each for at most `most` prompts."""
    for offset in range(0, part.prompts, most):
        yield {
            "optimizer_step": part.optimizer_step,
            "generation_step": part.block_id,
            "batch_size": min(most, part.prompts - offset),
            "seed": seed,
            "rank": rank_of_process(),
            "updates_per_block": part.updates_per_block,
            "start": part.start + offset,
            "prompts_per_block": part.prompts_per_block,
            "borders": list(part.borders),
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
    """A sample as an environment's row; the dataset's name is the task, so that metrics can be told apart by it."""
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


def _item(row: Row, index: int) -> dict[str, Any]:
    sample_id = row.info.get("sample_id")
    if not isinstance(sample_id, str):
        raise GradingError("the rollout's info has no sample_id; give a RemoteEnv its own rows")
    return {
        "sample_id": sample_id,
        "completion": completion_for_wire(row.completion),
        "completion_tokens": _tokens(row.state),
        "completion_index": index,
    }


def _tokens(state: State) -> int | None:
    try:
        return int(completion_tokens(state))
    except GradingError:
        # the server did not say; a grader that needs the number says so
        return None
