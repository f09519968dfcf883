"""The routes: prompts, grades, and what monitors ask for."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from verifiers.concurrency import gather_owned, threads_for
from verifiers.data.curriculum import Curriculum
from verifiers.errors import ConfigError
from verifiers.types import message_text
from verifiers_dataserver import __version__
from verifiers_dataserver.config import Configuration
from verifiers_dataserver.datasets import TaskRows
from verifiers_dataserver.grading.graders import Task, split_prompt
from verifiers_dataserver.grading.rewards import Rewards
from verifiers_dataserver.http import RequestError, answer_errors, read_request, token_required
from verifiers_dataserver.metrics import Metrics
from verifiers_dataserver.openapi import Route, describe
from verifiers_dataserver.sampling import Sampler
from verifiers_dataserver.scores import Score
from verifiers_dataserver.tasks import Completion, Row
from verifiers_dataserver.wire import (
    PAGE,
    GradeItem,
    GradeItem2,
    GradeRequest,
    GradeRequest2,
    RowsRequest,
    SampleRequest,
    SampleRequest2,
)

log = logging.getLogger("verifiers_dataserver")

_INLINE_ROWS = 256


class Routes:
    """The handlers and what they share; `token` is what requests must bring, None asks for none."""

    def __init__(
        self,
        configuration: Configuration,
        datasets: dict[str, TaskRows],
        rewards: Rewards,
        token: str | None = None,
    ) -> None:
        self._configuration = configuration
        self._datasets = datasets
        self._rewards = rewards
        self._token = token
        self._server = configuration.server
        self._max_body_bytes = self._server.max_body_mib * 2**20
        self._curriculum: Curriculum = configuration.curriculum
        self._sizes = {name: len(rows) for name, rows in datasets.items()}
        self._sampler = Sampler(self._curriculum, self._sizes)
        self._metrics = Metrics()
        self._ending = False

    def app(self) -> web.Application:
        """Return the application, for a runner with handler_cancellation, so that disconnects end grading."""
        middlewares: list[Any] = [self._metrics.count_answers, answer_errors]
        if self._token is not None:
            middlewares.append(token_required(self._token))
        app = web.Application(client_max_size=self._max_body_bytes, middlewares=middlewares)
        for route in self._table:
            getattr(app.router, f"add_{route.method}")(route.path, route.handler)
        return app

    @property
    def _table(self) -> list[Route]:
        return [
            Route("get", "/meta", self.meta),
            Route("post", "/sample", self.sample, SampleRequest),
            Route("post", "/grade", self.grade, GradeRequest, (503,)),
            Route("get", "/v2/meta", self.meta2),
            Route("post", "/v2/sample", self.sample2, SampleRequest2),
            Route("post", "/v2/rows", self.rows2, RowsRequest),
            Route("post", "/v2/grade", self.grade2, GradeRequest2, (503,)),
            Route("get", "/health", self.health),
            Route("get", "/metrics", self._metrics.show),
            Route("get", "/openapi.json", self.openapi),
        ]

    # -- about ----------------------------------------------------------------------------------------------

    async def meta(self, request: web.Request) -> web.Response:
        stages = [{"name": stage.name, "until_step": stage.until_step} for stage in self._curriculum.stages]
        return web.json_response({"total_iterations": self._total_steps(), "stages": stages})

    async def meta2(self, request: web.Request) -> web.Response:
        curriculum = self._curriculum
        stages = [
            {
                "name": stage.name,
                "until_step": stage.until_step,
                "datasets": [{"id": dataset.id, "weight": dataset.weight} for dataset in stage.datasets],
            }
            for stage in curriculum.stages
        ]
        return web.json_response(
            {
                "version": 2,
                "total_steps": self._total_steps(),
                "seed": curriculum.seed,
                "replacement": curriculum.replacement,
                "stages": stages,
                "datasets": [{"id": name, "rows": size} for name, size in self._sizes.items()],
                "max_batch": self._server.max_batch,
                "max_body_bytes": self._max_body_bytes,
                "grade_timeout_s": self._server.grade_timeout_s,
            }
        )

    def _total_steps(self) -> int | None:
        return self._configuration.total_steps or self._curriculum.stages[-1].until_step

    async def health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "datasets": len(self._datasets), "version": __version__})

    async def openapi(self, request: web.Request) -> web.Response:
        keyed, largest = self._token is not None, self._server.max_batch
        return web.json_response(describe(self._table, keyed=keyed, max_batch=largest, datasets=list(self._sizes)))

    # -- prompts --------------------------------------------------------------------------------------------

    async def sample(self, request: web.Request) -> web.Response:
        asked = await read_request(request, SampleRequest)
        self._check_count("batch_size", asked.batch_size)
        drawn = await self._sampler.by_iteration(asked.iteration, asked.batch_size)
        samples = [_sample(row) for row in await self._rows(drawn)]
        self._metrics.count_samples([name for name, _ in drawn], self._curriculum.stage_at(asked.iteration).name)
        return web.json_response({"samples": samples})

    async def sample2(self, request: web.Request) -> web.Response:
        asked = await read_request(request, SampleRequest2)
        self._check_count("batch_size", asked.batch_size)
        drawn = await self._sampler.by_block(asked)
        stage = self._curriculum.stage_at(asked.optimizer_step).name
        samples = [_sample2(row) for row in await self._rows(drawn)]
        log.debug(
            "rank %d: block %d at step %d, stage %s",
            asked.rank,
            asked.generation_step,
            asked.optimizer_step,
            stage,
        )
        self._metrics.count_samples([name for name, _ in drawn], stage)
        answer = {
            "samples": samples,
            "stage": stage,
            "optimizer_step": asked.optimizer_step,
            "generation_step": asked.generation_step,
            "seed": self._curriculum.seed if asked.seed is None else asked.seed,
            "rank": asked.rank,
        }
        return web.json_response(answer)

    async def rows2(self, request: web.Request) -> web.Response:
        asked = await read_request(request, RowsRequest)
        limit = min(PAGE, self._server.max_batch) if asked.limit is None else asked.limit
        self._check_count("limit", limit)
        size = self._sizes.get(asked.dataset)
        if size is None:
            raise RequestError(f"dataset {asked.dataset!r:.80} is not here; there are {', '.join(self._sizes)}")
        last = min(size, asked.offset + limit)
        drawn = [(asked.dataset, index) for index in range(asked.offset, last)]
        return web.json_response({"samples": [_sample2(row) for row in await self._rows(drawn)], "total": size})

    async def _rows(self, drawn: Sequence[tuple[str, int]]) -> list[Row]:
        def read() -> list[Row]:
            try:
                return [self._datasets[name].row(index) for name, index in drawn]
            except ConfigError as error:
                # the sentence may quote what graders alone may see
                log.warning("%s", error)
                raise RequestError(
                    "a row that this asks for cannot be served; the server's log says which and why",
                    code="broken_row",
                ) from None

        # rows of an Arrow table take a while to decode
        quick = len(drawn) <= _INLINE_ROWS and all(self._datasets[name].in_memory for name, _ in drawn)
        return read() if quick else await threads_for("rows", 2).run(read)

    # -- grades ---------------------------------------------------------------------------------------------

    async def grade(self, request: web.Request) -> web.Response:
        asked = await read_request(request, GradeRequest)
        scores = await self._grade(asked.items)
        results: list[dict[str, Any]] = []
        for item, score in zip(asked.items, scores, strict=True):
            result = {"sample_id": item.sample_id, "completion_index": item.completion_index}
            error = {} if score.value is not None else {"error": score.problem}
            results.append({**result, "reward": score.value, **error})
        problems = [score.problem for score in scores if score.value is None]
        if not problems:
            return web.json_response({"results": results})
        # Version 1 has no word for a failed grade. Its clients take what is missing for 0, but repeat a 503.
        message = f"{len(problems)} of {len(scores)} completions could not be graded; first: {problems[0]}"
        refusal = RequestError(message, status=503, code="grading_failed").body()
        return web.json_response({**refusal, "results": results}, status=503)

    async def grade2(self, request: web.Request) -> web.Response:
        asked = await read_request(request, GradeRequest2)
        log.debug(
            "rank %d: %d completions of block %s at step %s, seed %s",
            asked.rank,
            len(asked.items),
            asked.generation_step,
            asked.optimizer_step,
            asked.seed,
        )
        scores = await self._grade(asked.items)
        if self._ending and any(score.value is None for score in scores):
            # what the end of the server broke off is not a failure of a grader: the next server can grade it
            raise RequestError("the server is ending; send the request again", status=503, code="ending")
        results = [
            {
                "sample_id": item.sample_id,
                "completion_index": item.completion_index,
                "reward": score.value,
                "metrics": dict(score.metrics),
                "error": score.problem,
            }
            for item, score in zip(asked.items, scores, strict=True)
        ]
        return web.json_response({"results": results})

    def begin_end(self) -> None:
        """Refuse from now on requests that lack a grade, so that clients send them again."""
        self._ending = True

    async def _grade(self, items: Sequence[GradeItem | GradeItem2]) -> list[Score]:
        self._check_count("items", len(items))
        places = [self._place(item.sample_id) for item in items]
        rows = dict(zip(places, await self._rows(places), strict=True))
        by_dataset: dict[str, list[Task]] = {}
        for index, (item, place) in enumerate(zip(items, places, strict=True)):
            task = Task(rows[place], _completion(item), index)
            by_dataset.setdefault(place[0], []).append(task)
        columns = await gather_owned([self._grade_dataset(name, tasks) for name, tasks in by_dataset.items()])
        found = {index: score for column in columns for index, score in column}
        return [found[index] for index in range(len(items))]

    async def _grade_dataset(self, name: str, tasks: list[Task]) -> list[tuple[int, Score]]:
        scores = await self._rewards.by_dataset[name].grade(tasks)
        self._metrics.count_scores(name, scores)
        return [(task.index, score) for task, score in zip(tasks, scores, strict=True)]

    def _place(self, sample_id: str) -> tuple[str, int]:
        name, colon, number = sample_id.rpartition(":")
        size = self._sizes.get(name)
        is_number = number.isascii() and number.isdigit() and len(number) <= 16
        if not colon or size is None or not is_number or int(number) >= size or str(int(number)) != number:
            raise RequestError(
                f"sample_id {sample_id[:80]!r} is unknown; send one that /sample gave",
                code="unknown_sample_id",
            )
        return name, int(number)

    def _check_count(self, name: str, count: int) -> None:
        if count > self._server.max_batch:
            raise RequestError(
                f"{name} is {count}, over the max_batch of {self._server.max_batch}; ask several times",
                status=413,
                code="batch_too_large",
            )


def _sample(row: Row) -> dict[str, Any]:
    sample = _sample2(row)
    if sample["prompt"] is None:
        raise RequestError(
            f"sample {row.sample_id!r} is a conversation, which version 1 cannot carry; use /v2/sample",
            code="needs_version_2",
        )
    return {name: sample[name] for name in ("sample_id", "dataset_id", "system_prompt", "prompt", "metadata")}


def _sample2(row: Row) -> dict[str, Any]:
    system_prompt, prompt = split_prompt(row.prompt)
    return {
        "sample_id": row.sample_id,
        "dataset_id": row.sample_id.rpartition(":")[0],
        "system_prompt": system_prompt,
        "prompt": prompt,
        "messages": None if isinstance(row.prompt, str) else row.prompt,
        "task": row.task,
        "metadata": dict(row.shown),
    }


def _completion(item: GradeItem | GradeItem2) -> Completion:
    if isinstance(item.completion, str):
        return Completion(item.completion, item.completion_tokens)
    messages: list[dict[str, Any]] = [{**message} for message in item.completion]
    said = [message for message in messages if message.get("role", "assistant") == "assistant"]
    return Completion("".join(map(message_text, said)), item.completion_tokens, messages)
