"""Columns of a Hugging Face table that cannot be served: found at the start, not by a grade."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from typing import Any

from verifiers.errors import ConfigError
from verifiers_dataserver.config import DatasetTable

log = logging.getLogger("verifiers_dataserver")

_BATCH = 1000


def servable(source: Any, name: str, table: DatasetTable) -> Any:
    """Return the table without columns that are not JSON, such as dates and images: no grader could get them.

    Args:
        source: a `datasets.Dataset` with at least one row.
        name: the dataset's name, for messages.
        table: its part of the configuration.

    Raises:
        ConfigError: a column that the configuration or the format of rows names is not JSON.
    """
    wanted = {table.prompt_key, table.answer_key, "system_prompt", "metadata", "info"}
    dropped = [column for column in source.column_names if not _is_json(source, column)]
    for column in dropped:
        if column in wanted:
            raise ConfigError(
                f"dataset {name!r}: the column {column!r} holds {source.features[column]}, which is not JSON; "
                "make it texts or numbers, or name another column as prompt_key and answer_key."
            )
    if dropped:
        log.warning(
            "dataset %r: graders do not get the columns %s, for what they hold is not JSON.",
            name,
            ", ".join(map(repr, dropped)),
        )
    return source.remove_columns(dropped) if dropped else source


def prompts_of(source: Any, column: str) -> Iterator[Any]:
    """Yield all prompts of a table, read in batches."""
    only = source.select_columns([column])
    for start in range(0, len(only), _BATCH):
        yield from only[start : start + _BATCH][column]


def _is_json(source: Any, column: str) -> bool:
    import pyarrow

    # of what is stored: rows of dates may begin with an empty one
    pending = [source.data.schema.field(column).type]
    while pending:
        kind = pending.pop()
        types = pyarrow.types
        if (
            types.is_temporal(kind)
            or types.is_decimal(kind)
            or types.is_binary(kind)
            or types.is_large_binary(kind)
            or types.is_fixed_size_binary(kind)
        ):
            return False
        pending += [kind.field(place).type for place in range(kind.num_fields)]
    try:
        json.dumps(source.select_columns([column])[0][column])
    except (TypeError, ValueError):
        return False
    return True
