"""RemoteEnv: prompts and grades from a dataserver, which keeps the answers.

    env = RemoteEnv("http://127.0.0.1:9000")          # the server's curriculum
    env = RemoteEnv("http://127.0.0.1:9000", dataset="evaluation")

By name it is `verifiers.integrations.dataserver`: `vf-eval verifiers.integrations.dataserver -a '{"url": "..."}'`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verifiers.data.curriculum import Curriculum, staged_curriculum_from
from verifiers.data.row_source import PlannedBlock, StagedRows
from verifiers.envs.multiturn_env import SingleTurnEnv
from verifiers.errors import ConfigError, Error, GradingError, InfraError, ModelError, ProviderError
from verifiers.inference.endpoint import Endpoint, HttpBackend, encoded
from verifiers.inference.retry import RetryableError, RetryPolicy, retry
from verifiers.inference.wire import UNREADABLE
from verifiers.loop_thread import run_blocking
from verifiers.rollouts.recording_client import RolloutClient
from verifiers.rubrics.rubric import Rubric
from verifiers.rubrics.scoring import arguments_of, is_finite_number
from verifiers.rubrics.shaping import completion_tokens
from verifiers.types import MessageType, RolloutScore, State, message_text

logger = logging.getLogger("verifiers.envs")

MAX_ATTEMPTS = 4
_BACKOFF_S = 2.0
# also of the look whether a server that hangs up speaks TLS
_CONNECT_S = 10.0
# a page has 512 rows
_MOST_ANSWER_MB = 512.0
# time of a grading request beyond that of the server's graders
_GRADE_MARGIN_S = 10.0


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Bounds of one request to a server, and the seconds that it gives its graders."""

    max_batch: int
    max_body_bytes: int = 8 * 2**20
    grade_timeout_s: float = 0.0


@dataclass(frozen=True, slots=True)
class ServerMeta:
    """A server's description of itself: its curriculum, the rows of each dataset, and the steps of the curriculum."""

    curriculum: Curriculum
    sizes: Mapping[str, int]
    total_steps: int | None
    limits: RequestLimits


@dataclass(frozen=True, slots=True)
class Dataserver:
    """The address of a dataserver, and the timeouts and retries of requests to it.

    Attributes:
        token_var: environment variable that holds its bearer token; None for none.
        timeout_s: seconds of one try, up to the last byte of its answer.
        max_attempts: tries of a request in all, where it may pass.
    """

    url: str
    token_var: str | None = None
    timeout_s: float = 90.0
    max_attempts: int = MAX_ATTEMPTS

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(
                f"the dataserver's URL {self.url!r} is not an HTTP address; give one like 'http://127.0.0.1:9000'."
            )
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def meta(self) -> ServerMeta:
        data = self.request("/meta")
        with self._reading("/meta"):
            stages = {name: data[name] for name in ("stages", "seed", "replacement")}
            sizes = {dataset["id"]: int(dataset["rows"]) for dataset in data["datasets"]}
            own = {name: data[name] for name in ("max_body_bytes", "grade_timeout_s") if data.get(name) is not None}
            limits, total_steps = RequestLimits(int(data["max_batch"]), **own), data["total_steps"]
        return ServerMeta(staged_curriculum_from(stages), sizes, total_steps, limits)

    def rows(self, dataset: str, page: int) -> Iterable[dict[str, Any]]:
        offset, total = 0, 1
        while offset < total:
            answer = self.request("/rows", {"dataset": dataset, "offset": offset, "limit": page})
            with self._reading("/rows"):
                found, total = list(answer["samples"]), int(answer["total"])
                if not found and offset < total:
                    raise ValueError(f"no rows from {offset} on, of {total}")
            yield from found
            offset += page

    def samples(self, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Fetch the samples of a block or a part of it. Raises InfraError where another number of them came."""
        answer = self.request("/sample", body)
        with self._reading("/sample"):
            found: list[dict[str, Any]] = list(answer["samples"])
        if len(found) != body["batch_size"]:
            raise InfraError(
                f"the dataserver at {self.url} was asked for {body['batch_size']} samples and gave {len(found)}."
            )
        return found

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        try:
            yield
        except UNREADABLE as error:
            raise InfraError(
                f"the answer of {self.url} to /v2{path} is not a dataserver's ({type(error).__name__}: {error})."
            ) from error

    def request(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET a route of version 2, or POST a body to it; returns its JSON.

        Raises:
            ConfigError: the server refuses the request; it would refuse it again.
            InfraError: it gave no usable answer, also after all retries.
        """
        return run_blocking(lambda: self.request_async(path, body))

    async def request_async(
        self, path: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> Any:
        """Send a request as `request` does, on an event loop; `timeout_s` replaces the server's."""
        # a backend a request: scoring runs on any loop, and none is known to be the last
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        connect_s = min(_CONNECT_S, timeout_s)
        endpoint = Endpoint(f"{self.url}/v2", self._token(), {}, timeout_s, connect_s, _MOST_ANSWER_MB)
        backend = HttpBackend(endpoint)

        async def attempt() -> Any:
            try:
                return await backend.post(path, body)
            except RetryableError:
                raise
            except ModelError as error:
                is_too_large = isinstance(error, ProviderError) and error.status == 413
                hint = "; raise max_body_mib or max_batch under `server` in its file" if is_too_large else ""
                raise ConfigError(f"the dataserver at {self.url} refuses a request: {error}{hint}.") from error

        try:
            return await retry(attempt, RetryPolicy(max_attempts=self.max_attempts, base_s=_BACKOFF_S))
        except ProviderError as error:
            raise InfraError(f"the dataserver at {self.url} gave no answer: {error}.") from error
        finally:
            await backend.close()

    def _token(self) -> str:
        if self.token_var is None:
            return "EMPTY"
        if not (token := os.environ.get(self.token_var, "")):
            raise ConfigError(
                f"the dataserver's token_var names the variable {self.token_var!r}, which is not set; set it."
            )
        return token


# -- grades ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of one completion: a reward, or the error in its place."""

    reward: float | None
    metrics: Mapping[str, float]
    error: str | None


@dataclass(frozen=True, slots=True)
class RemoteGrader:
    server: Dataserver
    limits: RequestLimits

    def grades(self, items: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[Grade]:
        """Return the grade of each item, in order; joined on `completion_index`.

        Args:
            items: as /v2/grade takes them, each with a `completion_index` of its own.
            about: of all of them: `optimizer_step`, `generation_step`, `seed`, where known.
        """
        return run_blocking(lambda: self.grades_async(items, about))

    async def grades_async(self, items: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> list[Grade]:
        about = {"rank": rank_of_process(), **about}
        limits = self.limits

        def length_of(part: Sequence[Mapping[str, Any]]) -> int:
            return len(encoded({**about, "items": part}))

        def fits(part: Sequence[Mapping[str, Any]]) -> bool:
            return len(part) <= limits.max_batch and length_of(part) <= limits.max_body_bytes

        found: dict[int, Grade] = {}
        fitting = []
        for item in items:
            if (length := length_of([item])) > limits.max_body_bytes:
                text = f"the completion is {length} bytes long, over the dataserver's max_body_mib"
                found[item["completion_index"]] = Grade(None, {}, text)
            else:
                fitting.append(item)
        timeout_s = max(self.server.timeout_s, limits.grade_timeout_s + _GRADE_MARGIN_S)
        for part in _parts(fitting, fits) if fitting else ():
            answer = await self.server.request_async("/grade", {**about, "items": part}, timeout_s)
            found |= _joined(part, answer)
        return [found[item["completion_index"]] for item in items]


_Items = Sequence[Mapping[str, Any]]


def _parts(items: _Items, fits: Callable[[_Items], bool], *, is_told: bool = False) -> Iterator[_Items]:
    """Halve items until a request holds each part; completions of one sample stay together where they fit."""
    if len(items) <= 1 or fits(items):
        yield items
        return
    borders = [place for place in range(1, len(items)) if items[place]["sample_id"] != items[place - 1]["sample_id"]]
    if not borders and not is_told:
        logger.warning(
            "the %d completions of sample %s are more than a request to the dataserver holds and are graded in "
            "parts: a grader that compares them sees one part at a time.",
            len(items),
            items[0]["sample_id"],
        )
    middle = min(borders, key=lambda place: abs(2 * place - len(items)), default=len(items) // 2)
    for half in (items[:middle], items[middle:]):
        yield from _parts(half, fits, is_told=not borders)


def _joined(items: Sequence[Mapping[str, Any]], answer: Any) -> dict[int, Grade]:
    """Return grades by index; an item that the answer lacks is a failed grade."""
    try:
        found = {result["completion_index"]: _grade(result) for result in answer["results"]}
    except (TypeError, KeyError, AttributeError) as error:
        raise InfraError(f"the dataserver's answer to /v2/grade cannot be read: {answer!r:.300}.") from error
    missing = Grade(None, {}, "the answer has no result for it")
    return {item["completion_index"]: found.get(item["completion_index"], missing) for item in items}


def _grade(result: Mapping[str, Any]) -> Grade:
    reward, metrics = result.get("reward"), result.get("metrics") or {}
    if reward is None:
        return Grade(None, {}, str(result.get("error") or "no reward was given"))
    if not is_finite_number(reward):
        return Grade(None, {}, f"no finite reward was given, but {reward!r:.40}")
    return Grade(
        float(reward), {name: float(value) for name, value in metrics.items() if is_finite_number(value)}, None
    )


def completion_for_wire(completion: Any) -> str | list[dict[str, Any]]:
    """Return a completion as /v2/grade takes it: a text, or messages with the fields for graders."""
    if isinstance(completion, str):
        return completion
    messages = []
    for message in completion:
        fields = dict(message) if isinstance(message, Mapping) else {"role": "assistant"}
        kept = {name: fields[name] for name in ("role", "name", "tool_call_id") if fields.get(name)}
        messages.append({**kept, "content": message_text(message)})
    return messages


def rank_of_process() -> int:
    """Return the rank that a launcher gave this process; 0 without one."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdigit() else 0


_PAGE = 512
_REMEMBERED_BLOCKS = 64


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
    """

    def __init__(self, grader: RemoteGrader, source: RemoteRows | None = None) -> None:
        super().__init__()
        self.grader = grader
        self.source = source

    @property
    def has_group_funcs(self) -> bool:
        return True

    async def score_states(self, states: Sequence[State]) -> list[RolloutScore]:
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
    """The rows of a block as the dataserver draws them; `seed` replaces the curriculum's."""

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
        self._prompts = [_mark(row) for of_dataset in rows.values() for row in of_dataset]
        self._server = server
        self._max_batch = meta.limits.max_batch
        # newest blocks, as they were drawn
        self._drawn: dict[int, tuple[PlannedBlock, list[int]]] = {}

    def example_ids(self, block: PlannedBlock) -> list[int]:
        known, found = self._drawn.get(block.block_id, (None, []))
        if known != block:
            bodies = sample_requests(block, self.curriculum, self._max_batch)
            found = [self._example_id(sample) for body in bodies for sample in self._server.samples(body)]
            self._drawn[block.block_id] = block, found
            if len(self._drawn) > _REMEMBERED_BLOCKS:
                del self._drawn[next(iter(self._drawn))]
        return found

    def drawn_for(self, block_id: int) -> dict[str, int]:
        """Return the optimizer step and the seed with which a block was drawn; empty where it was not, here."""
        if block_id not in self._drawn:
            return {}
        return {"optimizer_step": self._drawn[block_id][0].optimizer_step, "seed": self.curriculum.seed}

    def _example_id(self, sample: Mapping[str, Any]) -> int:
        name, _, row = str(sample["sample_id"]).rpartition(":")
        with contextlib.suppress(KeyError, ValueError, IndexError):
            example_id = self.datasets[name][int(row)]
            if self._prompts[example_id] == _mark(_row(sample)):
                return example_id
        raise ConfigError(
            f"the dataserver gave sample {sample['sample_id']!r}, which is not as it was when this run began; start "
            "a new run, because its datasets have changed."
        )


def _mark(row: Mapping[str, Any]) -> int:
    """Return a number that tells a row's prompt from others, in this process."""
    return hash(json.dumps(row["prompt"]))


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
