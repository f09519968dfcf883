"""Counts for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Sequence

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from verifiers_dataserver.http import Handler
from verifiers_dataserver.scores import Score

_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0)


class Metrics:
    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._answers = Counter(
            "vf_dataserver_requests", "Answered requests", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "vf_dataserver_seconds", "Time to an answer", ["route"], registry=registry, buckets=_BUCKETS
        )
        self._samples = Counter("vf_dataserver_samples", "Prompts given", ["dataset", "stage"], registry=registry)
        self._graded = Counter("vf_dataserver_graded", "Completions with a reward", ["dataset"], registry=registry)
        self._rewards = Counter("vf_dataserver_reward", "Sum of rewards above 0", ["dataset"], registry=registry)
        self._failures = Counter(
            "vf_dataserver_failures", "Completions without a reward", ["dataset", "grader"], registry=registry
        )

    @web.middleware
    async def count_answers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count every answer, refusals too."""
        started = time.perf_counter()
        response = await handler(request)
        resource = request.match_info.route.resource
        route = resource.canonical if resource is not None else "unknown"
        method = request.method if resource is not None else "other"
        self._answers.labels(method, route, response.status).inc()
        self._seconds.labels(route).observe(time.perf_counter() - started)
        return response

    def count_samples(self, datasets: Sequence[str], stage: str) -> None:
        for dataset in datasets:
            self._samples.labels(dataset, stage).inc()

    def count_scores(self, dataset: str, scores: Sequence[Score]) -> None:
        for score in scores:
            if score.value is None:
                self._failures.labels(dataset, (score.problem or "").partition(":")[0]).inc()
            else:
                self._graded.labels(dataset).inc()
                self._rewards.labels(dataset).inc(max(0.0, score.value))

    async def show(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        return web.Response(body=generate_latest(self._registry), content_type="text/plain", charset="utf-8")
