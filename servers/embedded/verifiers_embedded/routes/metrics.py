"""Counts for Prometheus."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from verifiers_embedded.engine.engine import Engine
from verifiers_embedded.engine.generation import Generation, GenerationRequest
from verifiers_embedded.routes.http import Handler


class Metrics:
    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "vf_requests", "Answered requests", ["method", "route", "status"], registry=self._registry
        )
        self._prompt = Counter("vf_prompt_tokens", "Prompt tokens read", registry=self._registry)
        self._sampled = Counter("vf_generation_tokens", "Tokens sampled", registry=self._registry)
        self._ends = Counter("vf_completions", "Finished completions", ["finish_reason"], registry=self._registry)
        for name, text in (("running", "that have a slot"), ("waiting", "that wait for a slot")):
            gauge = Gauge(f"vf_sequences_{name}", f"Sequences {text}", registry=self._registry)
            gauge.set_function(lambda name=name: engine.counts[name])
        for name, text in (
            ("hits", "Prompts that continue a finished sequence"),
            ("tokens_reused", "Prompt tokens whose keys and values were kept"),
            ("bytes", "Memory of kept keys and values"),
        ):
            gauge = Gauge(f"vf_prefix_{name}", text, registry=self._registry)
            gauge.set_function(lambda name=name: engine.prefixes[name])
        paused = Gauge("vf_paused", "1 while no token is sampled until a resume", registry=self._registry)
        paused.set_function(lambda: float(engine.is_paused))

    def count_tokens(self, jobs: Sequence[GenerationRequest], generations: Sequence[Generation]) -> None:
        for job, generation in zip(jobs, generations, strict=True):
            self._prompt.inc(len(job.prompt_ids))
            self._sampled.inc(len(generation.token_ids))
            self._ends.labels(generation.finish_reason).inc()

    @property
    def count_answers(self) -> Any:
        """A middleware, outside of all others."""

        @web.middleware
        async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            resource = request.match_info.route.resource
            # the pattern, not the path: a scanner must not fill the registry
            route = resource.canonical if resource is not None else "unknown"
            self._answers.labels(request.method, route, str(response.status)).inc()
            return response

        return count

    async def show(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": "text/plain; version=0.0.4"}
        )
