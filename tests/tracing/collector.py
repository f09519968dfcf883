"""A collector that keeps the spans it is sent, and environments whose rollouts are traced."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status

ENVIRONMENT = """
import verifiers as vf


async def add(a: int, b: int) -> str:
    if a == 13:
        raise ValueError("unlucky")
    return str(a + b)


def right(completion):
    return float(completion[-1]["content"] == "3")


async def brief(completion):
    return 0.5


def ranks(completions):
    return [0.0] * len(completions)


def wrong(completion):
    raise RuntimeError("no grade")


def load_environment(n=1, funcs=("right", "brief", "ranks")):
    rows = [{"question": f"question {i}", "answer": "3"} for i in range(n)]
    rubric = vf.Rubric([globals()[name] for name in funcs])
    return vf.ToolEnv(dataset=rows, eval_dataset=rows, tools=[add], rubric=rubric)
"""


@dataclass(frozen=True)
class Sent:
    """A span as it arrived."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: dict[str, Any]
    failed: bool


@dataclass
class Collector:
    """What arrived."""

    url: str
    spans: list[Sent] = field(default_factory=list)

    def named(self, name: str) -> list[Sent]:
        return [span for span in self.spans if span.name.startswith(name)]

    def tree(self, parent: str = "") -> list[Any]:
        """Return the names below a span, each with those below it, in order."""
        below = [span for span in self.spans if span.parent == parent]
        return sorted((span.name, self.tree(span.id)) for span in below)


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                collector.spans += [_sent(span) for scope in of_resource.scope_spans for span in scope.spans]
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def _sent(span: Any) -> Sent:
    return Sent(
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        _values(span.attributes),
        span.status.code == Status.STATUS_CODE_ERROR,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: _value(item.value) for item in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
