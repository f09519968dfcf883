"""The process that sends a run's spans by OTLP: this file as a program, and what starts it and writes to it.

OpenTelemetry's SDK needs 20 microseconds of a core for a span, so the process that plays imports nothing of it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import marshal
import os
import select
import subprocess
import sys
import threading
from collections import deque
from typing import Any

CLOSE_S = 5.0
"""Seconds that the end of a run waits for a collector."""

LOADING_S = 30.0
"""Seconds that it waits for the process to load."""

_WRITE_EVERY_S, _SENT_TOGETHER = 0.5, 256


class SpanExporter:
    """A process that sends spans to a collector, and a thread that writes to it: where they hang, the run does not.

    Attributes:
        ended: spans as `main` reads them: name, trace, span and parent (0 for none), begin and end, attributes.
    """

    def __init__(self, url: str, most_waiting: int) -> None:
        self._url, self._ends = url, threading.Event()
        self.ended: deque[Any] = deque(maxlen=most_waiting)
        pipe = subprocess.PIPE
        # Ctrl-C is for the run alone
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, url], stdin=pipe, stdout=pipe, process_group=0
        )
        self._thread = threading.Thread(target=self._write, name="verifiers-tracing", daemon=True)
        self._thread.start()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while not self._ends.wait(_WRITE_EVERY_S) or self.ended:
                while count := min(len(self.ended), _SENT_TOGETHER):
                    spans = [self.ended.popleft() for _ in range(count)]
                    try:
                        marshal.dump(spans, pipe)
                    except ValueError:
                        # a number of numpy's, or the like
                        marshal.dump(json.loads(json.dumps(spans, default=str)), pipe)
                pipe.flush()
            # a process that was forked may hold the pipe open
            marshal.dump([], pipe)

    def close(self) -> None:
        """Send what is left, for at most `CLOSE_S` seconds after the process has loaded."""
        self._ends.set()
        with self._process as process:
            assert process.stdout is not None
            try:
                # a line comes when the process is loaded
                select.select([process.stdout], [], [], LOADING_S)
                process.wait(CLOSE_S)
            except subprocess.TimeoutExpired:
                pass
            finally:
                # also after Ctrl-C; nothing happens to one that has ended
                process.kill()
                self._thread.join()
        if process.returncode:
            logging.getLogger(__name__).warning("no answer of %s; spans may be missing there", self._url)


def main(url: str) -> None:
    """Send the spans that come, until a list is empty or the run is gone; the first that goes wrong is told."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    logging.basicConfig(
        format=f"verifiers: spans may be missing at {url.replace('%', '%%')}, and the run goes on: %(message)s"
    )
    first = iter([True])
    logging.root.handlers[0].addFilter(lambda _: next(first, False))
    # what is traced comes first
    os.nice(19)
    os.environ.setdefault("OTEL_SERVICE_NAME", "verifiers")

    class OneResource(Resource):
        """The only one there is: the SDK compares and hashes it for each span, as JSON, at half of a span's cost."""

        __hash__, __eq__ = object.__hash__, object.__eq__

    resource, scope = OneResource(Resource.create().attributes), InstrumentationScope("verifiers")
    exporter = OTLPSpanExporter(url.rstrip("/").removesuffix("/v1/traces") + "/v1/traces")
    flags, failed, ok = TraceFlags(1), Status(StatusCode.ERROR), Status()

    def read(
        name: str, trace: int, span: int, above: int, began: int, ended: int, given: dict[str, Any]
    ) -> ReadableSpan:
        options: Any = {"resource": resource, "instrumentation_scope": scope, "start_time": began, "end_time": ended}
        return ReadableSpan(
            name,
            SpanContext(trace, span, False, flags),
            SpanContext(trace, above, False, flags) if above else None,
            attributes={name: value for name, value in given.items() if value is not None},
            kind=SpanKind.CLIENT if "gen_ai.provider.name" in given else SpanKind.INTERNAL,
            status=failed if given.get("error.type") else ok,
            **options,
        )

    print(flush=True)
    with contextlib.suppress(EOFError):
        while spans := marshal.load(sys.stdin.buffer):
            try:
                exporter.export([read(*span) for span in spans])
            except Exception as error:
                logging.error("%s: %s", type(error).__name__, error)


if __name__ == "__main__":
    main(sys.argv[1])
