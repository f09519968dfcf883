"""Print the traces of MLflow's experiment 0 as JSON: of each its tokens, and its spans with types and parents."""

from __future__ import annotations

import json
import sys

import mlflow

mlflow.set_tracking_uri(sys.argv[1])
traces = mlflow.search_traces(locations=["0"], return_type="list", max_results=100)
told = [
    {
        "id": trace.info.trace_id,
        "tokens": trace.info.token_usage,
        "spans": [
            {
                "id": span.span_id,
                "parent": span.parent_id,
                "name": span.name,
                "type": span.span_type,
                "run": span.attributes.get("verifiers.run_id"),
                "version": span.attributes.get("verifiers.policy_version"),
            }
            for span in trace.data.spans
        ],
    }
    for trace in traces
]
print(json.dumps(told))
