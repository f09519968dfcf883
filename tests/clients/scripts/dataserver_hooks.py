"""Loaded by schemathesis: half of the completions that it thinks of are given to samples that exist."""

import itertools

import schemathesis

DATASETS = ("exact", "schema", "maths", "python", "rubric", "talk")

_turns = itertools.count()


@schemathesis.hook
def before_call(context, case, kwargs):
    if not case.path.endswith("/grade") or not isinstance(case.body, dict):
        return
    items = case.body.get("items")
    for index, item in enumerate(items if isinstance(items, list) else []):
        if isinstance(item, dict) and isinstance(item.get("sample_id"), str) and next(_turns) % 2 == 0:
            item["sample_id"] = f"{DATASETS[index % len(DATASETS)]}:{index % 4}"
