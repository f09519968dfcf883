"""Counts for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

        def show(name: str, text: str, read: Callable[[], float]) -> None:
            Gauge(name, text, registry=self._registry).set_function(read)

        show("vf_sequences_running", "Sequences that have a slot", lambda: engine.counts["running"])
        show("vf_sequences_waiting", "Sequences that wait for a slot", lambda: engine.counts["waiting"])
        show("vf_slots_used", "Share of the slots that are taken", lambda: engine.counts["running"] / engine.slots)
        show("vf_prefix_hits", "Prompts that continue a finished sequence", lambda: engine.prefixes["hits"])
        show(
            "vf_prefix_tokens_reused",
            "Prompt tokens whose keys and values were kept",
            lambda: engine.prefixes["tokens_reused"],
        )
        show("vf_prefix_bytes", "Memory of kept keys and values", lambda: engine.prefixes["bytes"])
        show("vf_paused", "1 while no token is sampled until a resume", lambda: float(engine.is_paused))

    def count_tokens(self, jobs: Sequence[GenerationRequest], generations: Sequence[Generation]) -> None:
        for job, generation in zip(jobs, generations, strict=True):
            self._prompt.inc(len(job.prompt_ids))
            self._sampled.inc(len(generation.token_ids))
            self._ends.labels(generation.finish_reason).inc()

    @web.middleware
    async def count_answers(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count every answer, refusals too; the outermost middleware."""
        response = await handler(request)
        resource = request.match_info.route.resource
        # the pattern, not the path: a scanner must not fill the registry
        route = resource.canonical if resource is not None else "unknown"
        self._answers.labels(request.method, route, str(response.status)).inc()
        return response

    async def show(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        return web.Response(
            body=generate_latest(self._registry), headers={"Content-Type": "text/plain; version=0.0.4"}
        )
