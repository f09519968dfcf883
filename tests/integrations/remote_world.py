"""Dataservers for the tests of their clients: the real one on a thread, and a scripted one that records."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from verifiers_dataserver.http import RequestError
from verifiers_dataserver.sampling import Sampler
from verifiers_dataserver.serving import serve_in_background
from verifiers_dataserver.wire import SampleRequest2

from verifiers.data.curriculum import staged_curriculum_from

STAGES = [
    {"name": "warm", "until_step": 2, "datasets": ["easy"]},
    {"name": "middle", "until_step": 4, "datasets": [{"id": "easy", "weight": 1}, {"id": "hard", "weight": 1}]},
    {"name": "main", "until_step": None, "datasets": ["hard"]},
]


@contextmanager
def dataserver(directory: Path, *, token: str | None = None, **fields: Any) -> Iterator[str]:
    """Serve the datasets easy and hard (24 rows each, `answer` = row number) and eval_set (4 rows)."""
    for name, count in (("easy", 24), ("hard", 24), ("eval_set", 4)):
        rows = [{"prompt": f"{name} {i}", "answer": f"{i}", "metadata": {"topic": name}} for i in range(count)]
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = {"metadata": ["topic"], "graders": ["exact"]}
    datasets = {name: {"jsonl": f"{name}.jsonl", **table} for name in ("easy", "hard", "eval_set")}
    config = {"datasets": datasets, "curriculum": {"seed": 3, "stages": STAGES}, **fields}
    path = directory / "config.yaml"
    path.write_text(json.dumps(config))
    with serve_in_background(path, token=token) as url:
        yield url


class RecordingServer:
    """Answers the routes of version 2 as the test says, and keeps every request.

    Its samples are those of a dataserver, which refuses requests that contradict themselves.

    Args:
        stages: of its curriculum.
        sizes: rows of each dataset.
        total_steps: of /v2/meta.
    """

    meta: Mapping[str, Any] = {}
    """Fields of /v2/meta that a test sets."""

    def __init__(
        self, stages: Any = STAGES, sizes: Mapping[str, int] | None = None, total_steps: int | None = None
    ) -> None:
        self.stages = stages
        self.sizes = dict(sizes or {"easy": 400, "hard": 400})
        self.total_steps = total_steps
        self.requests: list[tuple[str, Any]] = []
        self.tokens: list[str | None] = []
        # statuses that the next requests of a route are answered with instead
        self.faults: dict[str, list[int]] = {}
        # and bodies that they are answered with
        self.bodies: dict[str, Any] = {}
        self.grade: Callable[[list[dict[str, Any]]], Any] = lambda items: [
            {**item, "reward": 1.0, "metrics": {}, "error": None} for item in items
        ]
        self.url = ""

    def calls(self, path: str) -> list[Any]:
        """Return the bodies that a route got."""
        return [body for route, body in self.requests if route == path]

    def __enter__(self) -> RecordingServer:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                self.answer(None)

            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                self.answer(json.loads(self.rfile.read(length)))

            def answer(self, body: Any) -> None:
                server.requests.append((self.path, body))
                server.tokens.append(self.headers.get("Authorization"))
                faults = server.faults.get(self.path)
                status, found = faults.pop(0) if faults else 200, {"error": {"message": "as scripted"}}
                if status == 200:
                    try:
                        found = server.answer(self.path, body)
                    except RequestError as error:
                        status, found = 400, error.body()
                content = json.dumps(found).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Connection", "close")
                self.end_headers()
                self.wfile.write(content)
                self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = False
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, path: str, body: Any) -> Any:
        if path in self.bodies:
            return self.bodies[path]
        if path == "/v2/meta":
            datasets = [{"id": name, "rows": size} for name, size in self.sizes.items()]
            meta = {"stages": self.stages, "seed": 0, "replacement": False, "datasets": datasets}
            return {**meta, "version": 2, "total_steps": self.total_steps, "max_batch": 1024, **self.meta}
        if path == "/v2/rows":
            size = self.sizes[body["dataset"]]
            rows = range(body["offset"], min(size, body["offset"] + body["limit"]))
            return {"samples": [sample(f"{body['dataset']}:{row}") for row in rows], "total": size}
        if path == "/v2/sample":
            curriculum = staged_curriculum_from({"stages": self.stages})
            drawn = asyncio.run(Sampler(curriculum, self.sizes).by_block(SampleRequest2(**body)))
            return {"samples": [sample(f"{name}:{row}") for name, row in drawn]}
        return {"results": self.grade(body["items"])}


def sample(sample_id: str) -> dict[str, Any]:
    return {
        "sample_id": sample_id,
        "dataset_id": sample_id.partition(":")[0],
        "prompt": sample_id,
        "messages": [{"role": "user", "content": sample_id}],
        "metadata": {},
    }
