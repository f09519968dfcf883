"""Datasets as environments need them: a prompt and an id in every row, and rows read back with their defaults."""

from __future__ import annotations

import contextlib
import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verifiers.errors import ConfigError
from verifiers.keywords import warn_once
from verifiers.rubrics.scoring import reward_name, signature_of
from verifiers.types import ChatMessage, Info, Messages, MessageType, drop_none

if TYPE_CHECKING:
    from datasets import Dataset

_MOST_COMPARED = 50_000


def format_prompt(
    question: str, system_prompt: str | None = None, few_shot: Sequence[ChatMessage] | None = None
) -> list[ChatMessage]:
    """Return the messages for a question: the system prompt if there is one, the examples, the question."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, *(few_shot or []), {"role": "user", "content": question}]


def format_dataset(
    dataset: Dataset | Sequence[Mapping[str, Any]],
    system_prompt: str | None = None,
    few_shot: Sequence[ChatMessage] | None = None,
    question_key: str = "question",
    answer_key: str = "answer",
    message_type: MessageType = "chat",
) -> Dataset:
    """Return the dataset with columns `id` (0 .. N-1), `prompt` and `answer` added where they are absent.

    Messages in `prompt` are left alone: neither system prompt nor examples are put before them. A text there is a
    question, as in TRL's datasets. In completion mode the question is the prompt itself. A dataset without rows is
    taken, with a warning.
    """
    table = _as_dataset(dataset)
    columns = table.column_names
    if len(table) == 0:
        warn_once(__name__, "A dataset is empty: there is nothing to train on or to evaluate.")
        return type(table).from_dict({name: [] for name in (*columns, "prompt", "answer", "id")})
    if "prompt" not in columns and question_key not in columns:
        raise ConfigError(
            f"The dataset has neither a column 'prompt' nor a column {question_key!r}, only {', '.join(columns)}."
        )
    sources = {"prompt": question_key, "answer": answer_key}
    added = {name: source for name, source in sources.items() if name not in columns and source in columns}
    if "prompt" in columns and message_type == "chat":
        before = format_prompt("", system_prompt, few_shot)[:-1]
        if not isinstance(table[0]["prompt"], list):
            added["prompt"] = "prompt"
        elif table[0]["prompt"][: len(before)] != before:
            warn_once(
                __name__, "Rows with messages in `prompt` get neither system_prompt nor few_shot; put them there."
            )
    if added:

        def with_added(rows: Mapping[str, Any], places: Sequence[int]) -> dict[str, Any]:
            values = {name: rows[source] for name, source in added.items()}
            if "prompt" in values:
                for place, question in zip(places, values["prompt"], strict=True):
                    _check_question(question, place, added["prompt"])
            if "prompt" in values and message_type == "chat":
                values["prompt"] = [
                    [question] if isinstance(question, Mapping) else format_prompt(question, system_prompt, few_shot)
                    for question in values["prompt"]
                ]
            return values

        table = _map(table, with_added)
    elif message_type == "chat":
        _check_conversations(table)
    return table if "id" in columns else table.add_column("id", range(len(table)))


def _check_conversations(table: Dataset) -> None:
    """Refuse rows without a message; the table knows fast whether there are any."""
    import pyarrow.compute

    column = table.data.column("prompt")
    if not (pyarrow.types.is_list(column.type) or pyarrow.types.is_large_list(column.type)):
        return
    shortest = pyarrow.compute.min(pyarrow.compute.list_value_length(column)).as_py()
    if column.null_count or shortest == 0:
        for row, prompt in enumerate(table["prompt"]):
            if not prompt:
                raise ConfigError(f"Row {row} has no message in its 'prompt'; give it one, or leave the row out.")


def _check_question(question: Any, row: int, column: str) -> None:
    if not isinstance(question, (str, list)) and not (isinstance(question, Mapping) and "role" in question):
        raise ConfigError(f"Row {row} has {question!r:.80} as its {column!r}; give a text, or messages.")


def row_fields(row: Mapping[str, Any]) -> tuple[Messages, Any, str, Info]:
    """Return (prompt, answer, task, info) of a row.

    Absent or None: answer "", task "default", info {}. Info may be JSON text. Arrow tables give every message the
    fields of all others, as None; those are dropped from prompts and from the tools in `info`.
    """
    prompt = row.get("prompt")
    if prompt is None:
        raise ConfigError(f"A row has no prompt, only {', '.join(map(repr, row))}.")
    if not isinstance(prompt, str):
        prompt = [_lean_message(message) for message in prompt]
    answer, task = row.get("answer"), row.get("task")
    task = "default" if task in (None, "") else str(task)
    return prompt, "" if answer is None else answer, task, _info(row)


def count_trained_on(env: Any, rows: Iterable[Mapping[str, Any]]) -> int | None:
    """Return how many of the rows are also training rows of an environment: same prompt, answer and info.

    They are compared with the first `_MOST_COMPARED` training rows; a function that makes those and that nobody has
    called yet is not called for this. None where none was found and not all training rows were compared.
    """
    training = vars(env).get("_dataset")
    if training is None:
        return 0
    if callable(training):
        return None
    evaluated = Counter(map(_asked, rows))
    trained: set[str] = set()
    for row in training.select(range(min(len(training), _MOST_COMPARED))):
        if (asked := _asked(row)) in evaluated:
            trained.add(asked)
        if len(trained) == len(evaluated):
            break
    if not trained and evaluated and len(training) > _MOST_COMPARED:
        return None
    return sum(evaluated[asked] for asked in trained)


def _asked(row: Mapping[str, Any]) -> str:
    prompt, answer, _, info = row_fields(row)
    return json.dumps((prompt, answer, info), sort_keys=True, default=str)


def _lean_message(message: Any) -> Any:
    if not isinstance(message, Mapping):
        return message
    lean = drop_none(message)
    if "content" in message:
        # a message of tool calls alone has a content of None, and code that reads content expects the key
        lean.setdefault("content", None)
        parts = lean["content"]
        if isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], Mapping):
            # a text beside parts; see `_with_contents_alike`
            lean["content"] = parts[0]["text"] if parts[0].keys() == {"type", "text"} else parts
    return lean


def _info(row: Mapping[str, Any]) -> Info:
    value, whose = row.get("info"), f"Row {row['id']}" if "id" in row else "A row"
    if value is None or value == "":
        return {}
    try:
        info = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{whose} has an info that is text but not JSON ({error}): {value[:80]!r}.") from error
    if not isinstance(info, Mapping):
        raise ConfigError(
            f"{whose} has {info!r:.60} as its info; give a dict or the JSON text of one, not {type(info).__name__}."
        )
    return {name: drop_none(item) if name in ("oai_tools", "tool_defs") else item for name, item in info.items()}


def _as_dataset(dataset: Any) -> Dataset:
    if isinstance(dataset, Sequence) and not isinstance(dataset, (str, bytes)):
        rows: list[Mapping[str, Any]] = list(dataset)
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise ConfigError(
                    f"Row {number} is {row!r:.60}; a dataset given as a list must hold dicts, one a row."
                )
        return _from_rows(rows)
    if not hasattr(dataset, "column_names") or not hasattr(dataset, "__len__"):
        raise ConfigError(
            f"An environment takes a datasets.Dataset or a list of dicts, not {type(dataset).__name__}; "
            "choose one split of a DatasetDict, and turn a stream into a list."
        )
    if isinstance(dataset.column_names, Mapping):
        raise ConfigError(f"The dataset holds several splits ({', '.join(dataset.column_names)}); give one of them.")
    table: Dataset = dataset
    return table


def _from_rows(rows: Sequence[Mapping[str, Any]]) -> Dataset:
    import datasets

    # from_list looks at the first row's columns alone
    names: dict[Any, None] = dict.fromkeys(name for row in rows for name in row)
    for name in names:
        if not isinstance(name, str):
            row = next(number for number, row in enumerate(rows) if name in row)
            raise ConfigError(
                f"Row {row} has a column named {name!r}; give a text. A line of a CSV file with more cells than the "
                "header gives one named None."
            )
    columns = {name: [row.get(name) for row in rows] for name in names}
    if "prompt" in columns:
        columns["prompt"] = _with_contents_alike(columns["prompt"])
    _check_answers(columns.get("answer", []))
    if not _is_uniform(columns.get("info", [])):
        # a table would give every dict the keys of all others; what JSON does not hold stays
        with contextlib.suppress(TypeError):
            columns["info"] = [json.dumps(info) if isinstance(info, Mapping) else info for info in columns["info"]]
    try:
        return datasets.Dataset.from_dict(columns)
    except (TypeError, ValueError, OverflowError):  # pyarrow's own errors are of these classes
        raise ConfigError(_misfit(columns)) from None


def _check_answers(answers: Sequence[Any]) -> None:
    """Refuse, or tell of, answers of which a table would silently make others."""
    if not _is_uniform(answers):
        row = bisect_left(range(len(answers)), True, key=lambda row: not _is_uniform(answers[: row + 1]))
        raise ConfigError(
            f"Row {row} has {answers[row]!r:.60} as its answer, with other keys than another: a table would give "
            "each the keys of all; give answers as JSON text, or put them into info."
        )
    if {int, float} <= set(map(type, answers)):
        warn_once(__name__, "Some answers are whole numbers and some are not: 4 becomes 4.0; give them as text.")


def _with_contents_alike(prompts: list[Any]) -> list[Any]:
    """Write the texts of messages as parts where other messages have parts; `row_fields` gives them back as texts."""

    def written(message: Any) -> Any:
        is_text = isinstance(message, Mapping) and isinstance(message.get("content"), str)
        return {**message, "content": [{"type": "text", "text": message["content"]}]} if is_text else message

    talks = [prompt for prompt in prompts if isinstance(prompt, list)]
    if not any(isinstance(one, Mapping) and isinstance(one.get("content"), list) for talk in talks for one in talk):
        return prompts
    return [[written(one) for one in prompt] if isinstance(prompt, list) else prompt for prompt in prompts]


def _misfit(columns: Mapping[str, list[Any]]) -> str:
    """Return which row of which column does not fit the rows before it, and why."""
    import datasets

    def error_of(name: str, rows: int) -> Exception | None:
        try:
            datasets.Dataset.from_dict({name: columns[name][:rows]})
        except (TypeError, ValueError, OverflowError) as error:
            return error
        return None

    name = next(name for name, values in columns.items() if error_of(name, len(values)))
    row = bisect_left(range(1, len(columns[name])), True, key=lambda rows: error_of(name, rows) is not None)
    found = f"Row {row} has {columns[name][row]!r:.60} in its column {name!r}"
    error = error_of(name, row + 1)
    if isinstance(error, OverflowError):
        return f"{found}: whole numbers beyond 64 bits; give them as text."
    if isinstance(error, UnicodeEncodeError):
        return f"{found}: half of a character in {error.object[:60]!a}; a table holds whole characters."
    return (
        f"{found}, which does not fit the rows before it ({error}): a column holds one type throughout; give an info "
        "that varies as JSON text."
    )


def _is_uniform(values: Sequence[Any]) -> bool:
    """Return whether all dicts among the values have the same keys, at every level."""
    dicts = [value for value in values if isinstance(value, Mapping)]
    items = [item for value in values if isinstance(value, (list, tuple)) for item in value]
    if dicts and any(one.keys() != dicts[0].keys() for one in dicts):
        return False
    inner = all(_is_uniform([one[key] for one in dicts]) for key in (dicts[0] if dicts else ()))
    return inner and (not items or _is_uniform(items))


def _map(table: Dataset, function: Any) -> Dataset:
    with without_bars():
        return table.map(function, batched=True, with_indices=True)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Show no progress bars, noise for what takes a moment; the switch of the process is put back as it was."""
    import datasets

    shown = datasets.are_progress_bars_disabled() is False
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def selected(dataset: Dataset, n: int, seed: int | None) -> Dataset:
    """Return the first `n` rows, or all where it is negative; after a shuffle where `seed` is given."""
    if seed is not None:
        dataset = dataset.shuffle(seed=seed)
    return dataset if n < 0 else dataset.select(range(min(n, len(dataset))))


class LazyDataset:
    """A dataset as an attribute of an environment, which formats it; a function is called at the first reading."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = f"_{name}"

    def __get__(self, env: Any, owner: type | None = None) -> Any:
        if env is None:
            return self
        dataset = env.__dict__.get(self._name)
        if callable(dataset):
            self.__set__(env, dataset())
        return env.__dict__.get(self._name)

    def __set__(self, env: Any, dataset: Any) -> None:
        if dataset is not None and not callable(dataset):
            dataset = env.format_dataset(dataset, env.system_prompt, env.few_shot)
            if len(dataset) and "answer" not in dataset.column_names:
                named = [reward_name(func) for func in env.get_reward_funcs() if "answer" in signature_of(func).names]
                if named:
                    text = f"No row has an answer: {', '.join(named)} will be given an empty one."
                    warn_once(__name__, text)
        env.__dict__[self._name] = dataset
