"""The process that sends a run's spans by OTLP: this file as a program, and what starts it and writes to it.

The process that plays imports nothing of OpenTelemetry's SDK, where an encoded span takes some 20 microseconds.
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
    from opentelemetry.exporter.otlp.proto.http import trace_exporter
    from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext

    logging.basicConfig(
        format=f"verifiers: spans may be missing at {url.replace('%', '%%')}, and the run goes on: %(message)s"
    )
    first = iter([True])
    logging.root.handlers[0].addFilter(lambda _: next(first, False))
    # what is traced comes first
    os.nice(19)
    os.environ.setdefault("OTEL_SERVICE_NAME", "verifiers")

    # what stands around spans is the SDK's; they are made here, at a third of what its own objects cost
    any_span = ReadableSpan("", SpanContext(1, 1, False), instrumentation_scope=InstrumentationScope("verifiers"))
    around = trace_exporter.encode_spans([any_span])
    together = around.resource_spans[0].scope_spans[0].spans
    kinds = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
    failed = Status(code=Status.STATUS_CODE_ERROR)

    def value(given: Any) -> dict[str, Any]:
        if isinstance(given, list):
            return {"array_value": {"values": [value(one) for one in given]}}
        kind = kinds.get(type(given))
        return {kind: given} if kind else {"string_value": str(given)}

    def encoded(spans: list[Any]) -> Any:
        del together[:]
        for name, trace, span, above, began, ended, given in spans:
            options: dict[str, Any] = {"trace_id": trace.to_bytes(16), "span_id": span.to_bytes(8)}
            if above:
                options["parent_span_id"] = above.to_bytes(8)
            if given.get("error.type"):
                options["status"] = failed
            attributes = [{"key": key, "value": value(one)} for key, one in given.items() if one is not None]
            try:
                made = Span(
                    name=name,
                    start_time_unix_nano=began,
                    end_time_unix_nano=ended,
                    attributes=attributes,
                    kind=Span.SPAN_KIND_CLIENT if "gen_ai.provider.name" in given else Span.SPAN_KIND_INTERNAL,
                    **options,
                )
            except ValueError as error:
                # a server's number of over 64 bits, or half of a character
                logging.error("the span %r: %s", name, error)
            else:
                together.append(made)
        return around

    # the exporter's way to bytes has no other door; retries, headers and compression behind it stay its own
    trace_exporter.encode_spans = encoded  # type: ignore[assignment]
    exporter = trace_exporter.OTLPSpanExporter(url.rstrip("/").removesuffix("/v1/traces") + "/v1/traces")

    print(flush=True)
    with contextlib.suppress(EOFError):
        while spans := marshal.load(sys.stdin.buffer):
            try:
                exporter.export(spans)
            except Exception as error:
                logging.error("%s: %s", type(error).__name__, error)


if __name__ == "__main__":
    main(sys.argv[1])
