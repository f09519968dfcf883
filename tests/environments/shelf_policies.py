"""Scripted policies for the shelf: for each package one that does the task, and weak ones to compare it with.

Those that can, find the answer the way a model must: by calling the tools, or by reading what the environment says.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import io
import json
import math
import re
from collections.abc import Iterator
from typing import Any

from color_patches import COLORS
from PIL import Image, ImageStat
from shelf import Policy, Turn

import verifiers as vf
from verifiers.images import image_bytes, image_urls
from verifiers.testing import FakeOpenAIServer

__all__ = ["POLICIES", "open_environment"]


def tagged(tag: str, value: Any) -> str:
    return f"<{tag}>{value}</{tag}>"


def the_answer(tag: str) -> Policy:
    return lambda turn: tagged(tag, turn.answer)


# -- reverse_text, spell_backward ---------------------------------------------------------------------------------


def shuffled(turn: Turn) -> str:
    letters = list(turn.answer)
    turn.rng.shuffle(letters)
    return "".join(letters)


REVERSE_TEXT = {
    "oracle": the_answer("reversed_text"),
    "other_sentence": lambda turn: tagged("reversed_text", ".llim eht dniheb spam xis dnuof tolip eht"),
    "words_reversed": lambda turn: tagged("reversed_text", " ".join(reversed(turn.question.split()))),
    "letters_shuffled": lambda turn: tagged("reversed_text", shuffled(turn)),
    "echo": lambda turn: tagged("reversed_text", turn.question),
}
SPELL_BACKWARD = {
    "oracle": lambda turn: turn.answer,
    "letters_shuffled": shuffled,
    "echo": lambda turn: turn.answer[::-1],
}


# -- doublecheck --------------------------------------------------------------------------------------------------


def random_result(turn: Turn) -> str:
    return tagged("answer", turn.rng.randint(100, 10_000))


DOUBLECHECK = {
    "oracle": the_answer("answer"),
    "mends_half": lambda turn: (
        the_answer("answer")(turn) if turn.number and turn.rng.random() < 0.5 else "<answer>0</answer>"
    ),
    "gives_in": lambda turn: tagged("answer", int(turn.answer) + turn.number),
    "random_result": random_result,
}


# -- propose_solve ------------------------------------------------------------------------------------------------


def proposes_and_solves(length: int, *, solves: bool = True) -> Policy:
    def policy(turn: Turn) -> str:
        said: str = turn.messages[-1]["content"]
        if "backward" in said:
            return said.split()[-1][:: -1 if solves else 1]
        first, last = re.findall(r"\b[a-z]\b(?= to|,)", said)
        return first + "".join(letter for letter in "aeioust" if letter not in first + last)[: length - 2] + last

    return policy


PROPOSE_SOLVE = {
    "oracle": proposes_and_solves(6),
    "three_letters": proposes_and_solves(3),
    "echo": proposes_and_solves(6, solves=False),
    "chatty": lambda turn: f"The word is {proposes_and_solves(6)(turn)}",
}


# -- wordle -------------------------------------------------------------------------------------------------------


def guesses_and_marks(turn: Turn) -> list[tuple[str, str]]:
    """Return the valid guesses so far and their marks, from the environment's messages."""
    found = re.findall(
        r"^((?:[A-Z] ){4}[A-Z])\n((?:[GYX] ){4}[GYX])$", "\n".join(m["content"] for m in turn.said), re.M
    )
    return [(guess.replace(" ", "").lower(), marks.replace(" ", "")) for guess, marks in found]


def wordle_solver(turn: Turn) -> str:
    """Return a word that all marks so far allow: the one whose letters are commonest among those left."""
    import wordle

    left = [
        word
        for word in wordle.read_words()
        if all(wordle.marks_for(guess, word) == marks for guess, marks in guesses_and_marks(turn))
    ]
    counts = {letter: sum(letter in word for word in left) for letter in "abcdefghijklmnopqrstuvwxyz"}
    return tagged("guess", max(left, key=lambda word: sum(counts[letter] for letter in set(word))))


def random_word(turn: Turn) -> str:
    import wordle

    return tagged("guess", turn.rng.choice(wordle.read_words()))


WORDLE = {
    "oracle": the_answer("guess"),
    "solver": wordle_solver,
    "random_word": random_word,
    "same_word": lambda turn: tagged("guess", "crane"),
}


# -- xml_tools ----------------------------------------------------------------------------------------------------


def clerk(mind_discount: bool) -> Policy:
    """Asks for two prices and the discount, and reckons with the results."""

    def policy(turn: Turn) -> str:
        (many, first), (few, second) = re.findall(r"(\d+) x (\w+)", turn.question)
        asked = [("price", first), ("discount", first), ("price", second)]
        if turn.number < len(asked):
            name, item = asked[turn.number]
            return tagged("tool", json.dumps({"name": name, "args": {"item": item}}))
        results = [int(m["content"].removeprefix("<result>").removesuffix("</result>")) for m in turn.said[1::2]]
        one = results[0] - results[1] if mind_discount else results[0]
        return tagged("answer", int(many) * one + int(few) * results[2])

    return policy


XML_TOOLS = {
    "oracle": clerk(mind_discount=True),
    "forgets_discount": clerk(mind_discount=False),
    "guesses": lambda turn: tagged("answer", turn.rng.randint(1_000, 50_000)),
}


# -- sentence_repeater --------------------------------------------------------------------------------------------


def sentences(turn: Turn) -> list[str]:
    text = turn.question.partition("\n")[0]
    return [f"{sentence}." for sentence in text.removesuffix(".").split(". ")]


SENTENCE_REPEATER: dict[str, Policy] = {
    "oracle": lambda turn: sentences(turn)[turn.number],
    "random_sentence": lambda turn: turn.rng.choice(sentences(turn)),
    "first_sentence": lambda turn: sentences(turn)[0],
    "whole_text": lambda turn: " ".join(sentences(turn)),
}


# -- complete_sequence --------------------------------------------------------------------------------------------


def shown(turn: Turn) -> list[int]:
    return [int(number) for number in turn.question.splitlines()[-1].rstrip(",").split(", ")]


def same_step(turn: Turn) -> str:
    *_, before, last = shown(turn)
    return ", ".join(str(last + step * (last - before)) for step in (1, 2, 3))


COMPLETE_SEQUENCE: dict[str, Policy] = {
    "oracle": lambda turn: f" {turn.answer}\n",
    "same_step": same_step,
    "last_number": lambda turn: ", ".join([str(shown(turn)[-1])] * 3),
}


# -- arithmetic_tools ---------------------------------------------------------------------------------------------

TOOL_OF = {ast.Add: "add", ast.Sub: "subtract", ast.Mult: "multiply", ast.Mod: "remainder"}


def calculator(turn: Turn) -> dict[str, Any] | str:
    """Call the tools from the innermost brackets outwards, all that are ready in one message."""
    results: dict[str, int] = {}
    for message in turn.said:
        if message["role"] == "tool":
            results[message["tool_call_id"]] = int(message["content"])
    ready: dict[str, dict[str, Any]] = {}

    def value(node: ast.expr) -> int | None:
        if not isinstance(node, ast.BinOp):
            assert isinstance(node, ast.Constant)
            assert isinstance(node.value, int)
            return node.value
        call_id = f"at_{node.col_offset}_{node.end_col_offset}"
        if call_id not in results:
            a, b = value(node.left), value(node.right)
            if a is not None and b is not None:
                ready[call_id] = {"name": TOOL_OF[type(node.op)], "arguments": {"a": a, "b": b}, "id": call_id}
        return results.get(call_id)

    total = value(ast.parse(turn.question.replace("mod", "%"), mode="eval").body)
    return tagged("answer", total) if total is not None else {"tool_calls": list(ready.values())}


ARITHMETIC_TOOLS: dict[str, Policy] = {
    "oracle": calculator,
    "largest_number": lambda turn: tagged("answer", max(re.findall(r"\d+", turn.question), key=int)),
    "random_number": lambda turn: tagged("answer", turn.rng.randint(-1_000_000, 1_000_000)),
}

# -- python_math --------------------------------------------------------------------------------------------------

PROGRAMS = {
    r"largest prime factor of (\d+)": """
number, factor = {0}, 2
while factor * factor <= number:
    if number % factor:
        factor += 1
    else:
        number //= factor
number""",
    r"(\d+)\^(\d+) divided by (\d+)": "pow({0}, {1}, {2})",
    r"below (\d+) divisible by (\d+) or (\d+)": "sum(n for n in range({0}) if (n % {1} == 0) != (n % {2} == 0))",
    r"can (\d+) be paid with coins of (.+), any": """
ways = [1] + [0] * {0}
for coin in [{1}]:
    for total in range(coin, {0} + 1):
        ways[total] += ways[total - coin]
ways[{0}]""",
    r"1/(\d+) \+ .* 1/(\d+) as": """
from fractions import Fraction
total = sum(Fraction(1, n) for n in range({0}, {1} + 1))
print(total)""",
}


def programmer(turn: Turn) -> dict[str, Any] | str:
    """Write the program for the question, and answer with its output."""
    if turn.number == 0:
        for pattern, program in PROGRAMS.items():
            if match := re.search(pattern, turn.question):
                code = program.format(*match.groups())
                return {"tool_calls": [{"name": "python", "arguments": {"code": code}}]}
    return f"\\boxed{{{turn.newest.strip()}}}"


PYTHON_MATH: dict[str, Policy] = {
    "oracle": programmer,
    "small_number": lambda turn: f"\\boxed{{{turn.rng.randint(1, 100)}}}",
    "number_in_question": lambda turn: f"\\boxed{{{turn.rng.choice(re.findall(r'[0-9]+', turn.question))}}}",
}

# -- judged_rewrite -----------------------------------------------------------------------------------------------


def scripted_judge(body: dict[str, Any]) -> str:
    """Says yes to a message with a please in it, without the rude words."""
    message = body["messages"][-1]["content"].split("----------")[1].lower()
    return (
        "Yes." if "please" in message and not re.search("excuses|even you|bother|dawdling|nobody", message) else "No."
    )


def asks_politely(turn: Turn) -> str:
    info = turn.row["info"]
    return f"Could you please let us have the {info['thing']} by {info['day']}? Thank you very much."


JUDGED_REWRITE: dict[str, Policy] = {
    "oracle": asks_politely,
    "adds_please": lambda turn: f"{turn.question} Please.",
    "flatters": lambda turn: "Please know how much we all admire your work!",
    "echo": lambda turn: turn.question,
}

# -- instructions -------------------------------------------------------------------------------------------------


def obedient(turn: Turn) -> str:
    """Write four words on the subject, and around them what the constraints ask for."""
    info = turn.row["info"]
    asked = json.loads(info["constraints"])
    core = ["see", "our", info["subject"], "now"]
    pieces = asked.get("sentences") or asked.get("bullets") or 1
    between = "\n- " if "bullets" in asked else ". "
    text = between.join([*core[: pieces - 1], " ".join(core[pieces - 1 :])])
    text += f" {asked.get('word', '')}" + f" {asked.get('twice', '')}" * 2 + " very" * asked.get("at_least", 0)
    text = f"{'- ' if 'bullets' in asked else asked.get('begin', '')} {text} {asked.get('end', '')}".strip()
    text = text.upper() if "upper" in asked else text.lower()
    if "quotes" in asked:
        return f'"{text}"'
    return json.dumps({asked["json"]: text}) if "json" in asked else f"{asked.get('repeat', '')} {text}"


INSTRUCTIONS: dict[str, Policy] = {
    "oracle": obedient,
    "plain_sentence": lambda turn: f"I really like this {turn.row['info']['subject']} very much.",
    "off_subject": lambda turn: "this is a short text without any trouble at all",
    "echo": lambda turn: turn.question,
}

# -- structured_output --------------------------------------------------------------------------------------------


def keys_only(value: Any) -> Any:
    return {key: keys_only(inner) for key, inner in value.items()} if isinstance(value, dict) else ""


STRUCTURED_OUTPUT: dict[str, Policy] = {
    "oracle": lambda turn: turn.answer,
    "example_again": lambda turn: turn.messages[-2]["content"],
    "keys_only": lambda turn: json.dumps(keys_only(json.loads(turn.answer))),
    "chatty": lambda turn: f"Here is the object: {turn.answer}",
}

# -- mixed_text ---------------------------------------------------------------------------------------------------


def by_task(**policies: Policy) -> Policy:
    return lambda turn: policies[turn.row["task"].replace("-", "_")](turn)


MIXED_TEXT: dict[str, Policy] = {
    "oracle": by_task(reverse_text=REVERSE_TEXT["oracle"], sentence_repeater=SENTENCE_REPEATER["oracle"]),
    "repeats_only": by_task(reverse_text=REVERSE_TEXT["echo"], sentence_repeater=SENTENCE_REPEATER["oracle"]),
    "echo": by_task(reverse_text=REVERSE_TEXT["echo"], sentence_repeater=SENTENCE_REPEATER["whole_text"]),
}

# -- color_patches ------------------------------------------------------------------------------------------------


def mean_color(turn: Turn) -> str:
    (url,) = image_urls(turn.messages)
    pixels = ImageStat.Stat(Image.open(io.BytesIO(image_bytes(url)))).mean
    return min(COLORS, key=lambda name: math.dist(pixels, COLORS[name]))


COLOR_PATCHES: dict[str, Policy] = {
    "oracle": mean_color,
    "always_red": lambda turn: "red",
    "sentence": lambda turn: f"It is {mean_color(turn)}.",
}

POLICIES: dict[str, dict[str, Policy]] = {
    "arithmetic_tools": ARITHMETIC_TOOLS,
    "color_patches": COLOR_PATCHES,
    "complete_sequence": COMPLETE_SEQUENCE,
    "doublecheck": DOUBLECHECK,
    "instructions": INSTRUCTIONS,
    "judged_rewrite": JUDGED_REWRITE,
    "mixed_text": MIXED_TEXT,
    "propose_solve": PROPOSE_SOLVE,
    "python_math": PYTHON_MATH,
    "reverse_text": REVERSE_TEXT,
    "sentence_repeater": SENTENCE_REPEATER,
    "spell_backward": SPELL_BACKWARD,
    "structured_output": STRUCTURED_OUTPUT,
    "wordle": WORDLE,
    "xml_tools": XML_TOOLS,
}


_usual = functools.cache(vf.load_environment)


@contextlib.contextmanager
def open_environment(name: str, **arguments: Any) -> Iterator[vf.Environment]:
    """Yield the environment, made once without arguments, with a judge for the one that needs one."""
    if name != "judged_rewrite":
        yield vf.load_environment(name, **arguments) if arguments else _usual(name)
        return
    with FakeOpenAIServer(scripted_judge) as judge:
        yield vf.load_environment(name, **{"judge_base_url": judge.url, **arguments})
