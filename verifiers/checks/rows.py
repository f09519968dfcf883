"""What can be said of an environment's rows without a model: gaps, repetitions, leaks, lengths."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from verifiers.checks.check_report import CheckFinding, Severity, named_rows
from verifiers.envs.datasets import row_fields
from verifiers.envs.multiturn_env import SingleTurnEnv
from verifiers.envs.tool_env import ToolEnv
from verifiers.errors import ConfigError
from verifiers.rubrics.judge_rubric import JudgeRubric, question_text
from verifiers.rubrics.scoring import reward_name, signature_of
from verifiers.testing.fake_model import rubrics_of
from verifiers.types import message_field

NGRAM = 8
"""Words of the pieces by which near repetitions are found."""

OVERLAP = 0.8
_FEWEST_PIECES = 5
_MOST_ROWS = 20_000
_LEAKED = 0.5
_FEW_PROMPTS, _FEW_OPENINGS = 0.05, 0.5
_FEWEST_WORDS = 7
_SHORTEST_ANSWER, _MATERIAL, _CHOICES = 3, 0.5, 0.25

CountTokens = Callable[[Any], int]
Fields = tuple[Any, Any, str, Mapping[str, Any]]


def check_rows(
    env: Any, count_tokens: CountTokens | None = None, max_model_len: int | None = None
) -> tuple[list[CheckFinding], dict[str, Any]]:
    """Check the training and the eval rows of an environment; of each the first 20,000.

    Args:
        count_tokens: of a prompt, with the chat template; None leaves lengths out.
        max_model_len: tokens that the model reads at most.
    """
    findings: list[CheckFinding] = []
    numbers: dict[str, Any] = {}
    rows_of: dict[str, list[Fields]] = {}
    for name, dataset in (("training", env.dataset), ("eval", env.eval_dataset)):
        if dataset is None or not len(dataset):
            continue
        rows: list[Fields] = [row_fields(row) for row in dataset.select(range(min(len(dataset), _MOST_ROWS)))]
        rows_of[name] = rows
        columns = {column: str(kind) for column, kind in dataset.features.items()}
        numbers[name] = {"rows": len(dataset), "read": len(rows), "columns": columns}
        kind = f"{name} row"
        findings += [
            *_missing_answers(env, rows, kind),
            *_repeated(env, rows, kind),
            *_answers_in_prompts(rows, kind),
        ]
        if count_tokens is not None:
            lengths = sorted((count_tokens(prompt), place) for place, (prompt, *_) in enumerate(rows))
            numbers[name]["prompt_tokens"] = {"median": lengths[len(lengths) // 2][0], "most": lengths[-1][0]}
            findings += _too_long(lengths, max_model_len, kind)
    if not rows_of:
        raise ConfigError("no dataset of the environment has rows; give it some.")
    if "training" in rows_of and "eval" in rows_of:
        findings += _trained_on(env, rows_of["training"], rows_of["eval"])
    elif "training" in rows_of:
        text = "there are no eval rows: evaluations use the training rows, and say nothing about new ones"
        findings.append(
            CheckFinding("no-eval-rows", "note", "eval rows", text, "give the environment an eval_dataset.")
        )
    return findings, numbers


def _missing_answers(env: Any, rows: list[Fields], kind: str) -> Iterator[CheckFinding]:
    """Find rows without an answer, task by task: those of another task may need none."""
    by_task: dict[str, list[int]] = {}
    for place, (_, _, task, _) in enumerate(rows):
        by_task.setdefault(task, []).append(place)
    for task, places in by_task.items():
        member = env.get_env_for_task(task)
        prompts = [rubric.judge_prompt for rubric in rubrics_of(member) if isinstance(rubric, JudgeRubric)]
        # what asks a judge names the answer to pass it on, also where no judge is shown it
        passes_on = {"judge", "verdict"} if prompts and "{answer" not in "".join(prompts) else set()
        reading = [
            reward_name(func)
            for func in member.get_reward_funcs()
            if "answer" in (names := signature_of(func).names) and passes_on.isdisjoint(names)
        ]
        without = [place for place in places if rows[place][1] in ("", None)]
        is_whole = len(without) == len(places)
        if without and (reading or not is_whole):
            who = f"; {', '.join(reading)} will be given an empty one" if reading else ""
            text = f"{len(without)} of {len(places)} rows have no answer{who}"
            mend = "give each row an answer, or leave rows without one out."
            # of a column that is not there, somebody decided so
            severity: Severity = "error" if reading and not is_whole else "warning"
            yield CheckFinding("missing-answer", severity, named_rows(without, kind), text, mend)


def _repeated(env: Any, rows: list[Fields], kind: str) -> Iterator[CheckFinding]:
    seen: dict[str, int] = {}
    answers: dict[str, tuple[int, str]] = {}
    again, contradicting = [], []
    for place, (prompt, answer, task, info) in enumerate(rows):
        asked = _key(prompt, task, info)
        whole = _key(asked, answer)
        if whole in seen:
            again.append(place)
        elif asked in answers:
            contradicting.append(place)
        seen.setdefault(whole, place)
        answers.setdefault(asked, (place, str(answer)))
    if again:
        text = f"{len(again)} of {len(rows)} rows repeat an earlier one"
        mend = "leave repetitions out: their prompts count more than others, and intervals come out too narrow."
        yield CheckFinding("repeated-rows", "warning", named_rows(again, kind), text, mend)
    if contradicting and not _is_hidden(env, rows):
        first = contradicting[0]
        before, answer = answers[_key(*(rows[first][part] for part in (0, 2, 3)))]
        text = (
            f"{len(contradicting)} rows ask what an earlier one asks and have another answer, such as row {before} "
            f"({answer!r:.40}) and row {first} ({rows[first][1]!r:.40})"
        )
        mend = "give one answer a question, or put what tells them apart into the prompt."
        yield CheckFinding("contradicting-rows", "error", named_rows(contradicting, kind), text, mend)


def _is_hidden(env: Any, rows: list[Fields]) -> bool:
    """Return whether most rows ask the same: a game, whose secret stands in the answer or the info."""
    members = [env.get_env_for_task(task) for task in {task for _, _, task, _ in rows}]
    few = _FEW_PROMPTS if any(isinstance(member, SingleTurnEnv | ToolEnv) for member in members) else _FEW_OPENINGS
    return len({_key(prompt) for prompt, *_ in rows}) <= few * len(rows)


def _answers_in_prompts(rows: list[Fields], kind: str) -> Iterator[CheckFinding]:
    """Find answers that can be copied; where other rows' answers stand there as well, they are choices."""
    asked = [
        (place, text, str(answer))
        for place, (prompt, answer, *_) in enumerate(rows)
        # what makes up most of a prompt is what the task is about
        if _SHORTEST_ANSWER <= len(str(answer)) < _MATERIAL * len(text := _given_text(prompt))
    ]
    own = [place for place, text, answer in asked if _stands_in(answer, text)]
    others = 0
    for at, (_, text, answer) in enumerate(asked):
        other = next((found for _, _, found in (*asked[at + 1 :], *asked[:at]) if found != answer), None)
        others += other is not None and _stands_in(other, text)
    can_tell = len({answer for *_, answer in asked}) > 1
    if can_tell and len(own) >= _LEAKED * len(asked) and others < _CHOICES * len(own):
        text = f"the answer stands in the prompt of {len(own)} of {len(asked)} rows, and a policy can copy it"
        mend = "take it out, unless finding it there is the task."
        yield CheckFinding("answer-in-prompt", "warning", named_rows(own, kind), text, mend)


def _given_text(prompt: Any) -> str:
    """Return what a prompt says, without the answers of its examples."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(question_text([one]) for one in prompt if message_field(one, "role") != "assistant")


def _stands_in(answer: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) is not None


def _too_long(lengths: list[tuple[int, int]], max_model_len: int | None, kind: str) -> Iterator[CheckFinding]:
    over = [place for tokens, place in lengths if max_model_len is not None and tokens >= max_model_len]
    if over:
        longest = lengths[-1][0]
        text = f"{len(over)} prompts leave no room for an answer in {max_model_len} tokens; the longest has {longest}"
        mend = "leave them out, shorten them, or serve the model with a larger --max-model-len."
        yield CheckFinding("over-context", "error", named_rows(sorted(over), kind), text, mend)


# -- rows that are trained and evaluated on --------------------------------------------------------------------------


def _trained_on(env: Any, training: list[Fields], evaluated: list[Fields]) -> Iterator[CheckFinding]:
    asked = _key_of_row if _is_hidden(env, training) else lambda row: _key(row[0])
    trained = set(map(asked, training))
    exact = [place for place, row in enumerate(evaluated) if asked(row) in trained]
    if exact:
        text = (
            f"{len(exact)} of {len(evaluated)} eval prompts are training prompts too: the eval reward is not held out"
        )
        mend = "take them out of one of the two sets."
        yield CheckFinding("eval-trained-on", "error", named_rows(exact, "eval row"), text, mend)
    known = set(exact)
    near = _near(training, {place: row for place, row in enumerate(evaluated) if place not in known})
    if near:
        place, share = max(near.items(), key=lambda item: item[1])
        text = (
            f"{len(near)} of {len(evaluated)} eval prompts share at least {OVERLAP:.0%} of their pieces of {NGRAM} "
            f"words with one training prompt (row {place}: {share:.0%}), pieces of many prompts left out"
        )
        mend = "take them out of one of the two sets, unless they differ in what is asked."
        yield CheckFinding("eval-nearly-trained-on", "warning", named_rows(near, "eval row"), text, mend)


def _near(training: list[Fields], evaluated: Mapping[int, Fields]) -> dict[int, float]:
    """Return, by eval row, the largest share of its pieces that one training prompt has."""
    places: dict[int, list[int]] = {}
    for at, (prompt, *_) in enumerate(training):
        for piece in _pieces(prompt):
            places.setdefault(piece, []).append(at)
    # what many prompts say is their form
    usual = max(3, len(training) // 20)
    in_eval = Counter(piece for prompt, *_ in evaluated.values() for piece in _pieces(prompt))
    found = {}
    for place, (prompt, *_) in evaluated.items():
        of_words = _pieces(prompt)
        pieces = [piece for piece in of_words if len(places.get(piece, ())) < usual and in_eval[piece] < usual]
        if sum(of_words[piece] for piece in pieces) >= _FEWEST_PIECES:
            shared = Counter(at for piece in pieces for at in places.get(piece, ()))
            share = max(shared.values(), default=0) / len(pieces)
            if share >= OVERLAP:
                found[place] = share
    return found


def _pieces(prompt: Any) -> Mapping[int, bool]:
    """Return a prompt's pieces, and of each whether it is made of words: boards and grids repeat a few symbols."""
    words = re.findall(r"\w+", question_text(prompt).lower())
    pieces = (tuple(words[at : at + NGRAM]) for at in range(len(words) - NGRAM + 1))
    return {hash(piece): len(set(piece)) >= _FEWEST_WORDS for piece in pieces}


def _key_of_row(row: Fields) -> str:
    return _key(*row)


def _key(*values: Any) -> str:
    return json.dumps(values, sort_keys=True, default=str)
