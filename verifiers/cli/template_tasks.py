"""The tasks that `vf-init` starts an environment from, one a kind, cut into the parts that files are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["TASKS", "Part", "Task"]


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a package with several, one section of a package with one.

    Attributes:
        imports: lines of the standard library.
        needs: other parts, and the names taken from them.
    """

    name: str
    docstring: str
    code: str
    imports: tuple[str, ...] = ()
    needs: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Task:
    """What an environment of one kind starts as.

    Attributes:
        arguments: name, default and meaning of each argument of load_environment, for the README.
        rewards: name and meaning of each reward function, for the README.
    """

    summary: str
    parts: tuple[Part, ...]
    arguments: tuple[tuple[str, str, str], ...]
    rewards: tuple[tuple[str, str], ...]


_SORTING = Task(
    summary="Sort a few words alphabetically, in one turn.",
    parts=(
        Part(
            name="data",
            docstring="Questions that are made on the spot, so that nothing has to be downloaded.",
            imports=("import random",),
            code='''\
WORDS = (
    "apple bread chair dance eagle flame grape house ivory juice kite lemon mango "
    "night ocean piano queen river stone tiger umbrella violin water yellow zebra"
).split()
MOST_QUESTIONS = 50_000


def make_rows(n: int, rng: random.Random, taken: set[str]) -> list[dict[str, str]]:
    """`n` questions with answers, none of them in `taken`, to which they are added."""
    if len(taken) + n > MOST_QUESTIONS:
        raise ValueError(f"there are at most {MOST_QUESTIONS} questions; ask for fewer")
    rows = []
    while len(rows) < n:
        words = rng.sample(WORDS, 4)
        question = f"Sort these words alphabetically: {', '.join(words)}"
        if question not in taken:
            taken.add(question)
            rows.append({"question": question, "answer": ", ".join(sorted(words))})
    return rows
''',
        ),
        Part(
            name="rewards",
            docstring="What an answer is worth. Arguments are filled in by their names.",
            code='''\
def sorted_exactly(completion, answer, parser) -> float:
    """1.0 where the words stand in the right order."""
    return float(parser.parse_answer(completion) == answer)


def share_in_place(completion, answer, parser) -> float:
    """Share of the words that stand in their place."""
    given = (parser.parse_answer(completion) or "").split(", ")
    wanted = answer.split(", ")
    return sum(g == w for g, w in zip(given, wanted, strict=False)) / len(wanted)
''',
        ),
        Part(
            name="environment",
            docstring="The environment: questions, how an answer is read, what it is worth.",
            imports=("import random",),
            needs=(("data", "make_rows"), ("rewards", "share_in_place, sorted_exactly")),
            code='''\
SYSTEM_PROMPT = "Answer with the words alone, separated by ', ', in <answer> tags."


def load_environment(
    num_train: int = 200, num_eval: int = 50, seed: int = 0
) -> vf.Environment:
    """Make the environment; the same arguments give the same questions."""
    rng = random.Random(seed)
    taken: set[str] = set()
    # the questions to evaluate on are drawn first: they stay when num_train changes
    eval_rows = make_rows(num_eval, rng, taken)
    parser = vf.XMLParser(["answer"])
    return vf.SingleTurnEnv(
        dataset=make_rows(num_train, rng, taken),
        eval_dataset=eval_rows,
        system_prompt=SYSTEM_PROMPT,
        parser=parser,
        rubric=vf.Rubric(
            [sorted_exactly, share_in_place], weights=[1.0, 0.0], parser=parser
        ),
    )
''',
        ),
    ),
    arguments=(
        ("num_train", "200", "questions to train on"),
        ("num_eval", "50", "questions to evaluate on, none of them trained on"),
        ("seed", "0", "chooses the questions"),
    ),
    rewards=(
        ("sorted_exactly", "1 where the words stand in the right order, else 0. Weight 1."),
        ("share_in_place", "share of the words that stand in their place. Weight 0: it is only reported."),
    ),
)

_GUESSING = Task(
    summary="Find a number by asking whether it is higher or lower, over several turns.",
    parts=(
        Part(
            name="data",
            docstring="Numbers to find, made on the spot.",
            imports=("import random",),
            code='''\
HIGHEST = 100

QUESTION = (
    f"I think of a number from 1 to {HIGHEST}. Guess it: answer with a number alone, "
    "and I say whether mine is higher or lower."
)


def make_rows(n: int, rng: random.Random) -> list[dict[str, str]]:
    """`n` rows; the answer is the number to find, which the question does not tell."""
    return [
        {"question": QUESTION, "answer": str(rng.randint(1, HIGHEST))} for _ in range(n)
    ]
''',
        ),
        Part(
            name="rewards",
            docstring="What a game is worth. Arguments are filled in by their names.",
            code='''\
def found(state) -> float:
    """1.0 where the number was found."""
    return float(state["stop_condition"] == "number_found")


def guesses(state) -> float:
    """How many guesses were made."""
    return float(state["turn"])
''',
        ),
        Part(
            name="environment",
            docstring="The environment: it answers every guess until the number is found.",
            imports=("import random",),
            needs=(("data", "make_rows"), ("rewards", "found, guesses")),
            code='''\
class GuessingEnv(vf.MultiTurnEnv):
    """Says whether the number is higher or lower than the guess."""

    @vf.stop
    async def number_found(self, state) -> bool:
        said = [m for m in state["completion"] if m["role"] == "assistant"]
        return bool(said) and said[-1]["content"].strip() == state["answer"]

    async def env_response(self, messages, state, **kwargs):
        guess, number = messages[-1]["content"].strip(), int(state["answer"])
        if not guess.isdecimal():
            hint = "Answer with a number alone."
        else:
            hint = "higher" if number > int(guess) else "lower"
        return [{"role": "user", "content": hint}]


def load_environment(
    num_train: int = 200, num_eval: int = 50, seed: int = 0, max_turns: int = 10
) -> vf.Environment:
    """Make the environment; the same arguments give the same numbers."""
    rng = random.Random(seed)
    # the numbers to evaluate on are drawn first: they stay when num_train changes
    eval_rows = make_rows(num_eval, rng)
    return GuessingEnv(
        dataset=make_rows(num_train, rng),
        eval_dataset=eval_rows,
        rubric=vf.Rubric([found, guesses], weights=[1.0, 0.0]),
        max_turns=max_turns,
    )
''',
        ),
    ),
    arguments=(
        ("num_train", "200", "games to train on"),
        ("num_eval", "50", "games to evaluate on; their numbers may be among those trained on"),
        ("seed", "0", "chooses the numbers"),
        ("max_turns", "10", "guesses in one game"),
    ),
    rewards=(
        ("found", "1 where the number was found within `max_turns` guesses, else 0. Weight 1."),
        ("guesses", "how many guesses were made. Weight 0: it is only reported."),
    ),
)

_SHOPPING = Task(
    summary="Work out what a basket costs, with a tool that knows the prices.",
    parts=(
        Part(
            name="data",
            docstring="A price list, and baskets made on the spot.",
            imports=("import random",),
            code='''\
PRICES = {"apple": 30, "bread": 250, "cheese": 420, "egg": 25, "milk": 110, "pear": 45}
MOST_QUESTIONS = 50_000


def make_rows(n: int, rng: random.Random, taken: set[str]) -> list[dict[str, str]]:
    """`n` questions with answers, none of them in `taken`, to which they are added."""
    if len(taken) + n > MOST_QUESTIONS:
        raise ValueError(f"there are at most {MOST_QUESTIONS} questions; ask for fewer")
    rows = []
    while len(rows) < n:
        basket = {item: rng.randint(1, 9) for item in rng.sample(sorted(PRICES), 3)}
        listed = ", ".join(f"{count} x {item}" for item, count in basket.items())
        question = f"What do {listed} cost together, in cents?"
        if question not in taken:
            taken.add(question)
            total = sum(PRICES[item] * count for item, count in basket.items())
            rows.append({"question": question, "answer": str(total)})
    return rows
''',
        ),
        Part(
            name="tools",
            docstring="What the policy may call.",
            needs=(("data", "PRICES"),),
            code='''\
def price_of(item: str) -> int:
    """Look up what one piece costs, in cents.

    Args:
        item: its name, in the singular, such as "apple".
    """
    if item not in PRICES:
        raise ValueError(f"there is no {item!r}; there are {', '.join(PRICES)}")
    return PRICES[item]
''',
        ),
        Part(
            name="rewards",
            docstring="What a rollout is worth. Arguments are filled in by their names.",
            code='''\
def right_total(completion, answer) -> float:
    """1.0 where the last message is the right number."""
    return float((completion[-1]["content"] or "").strip() == answer)


def tool_calls(completion) -> float:
    """How often a tool was called."""
    return float(sum(message["role"] == "tool" for message in completion))
''',
        ),
        Part(
            name="environment",
            docstring="The environment: questions, the tool, and what an answer is worth.",
            imports=("import random",),
            needs=(("data", "make_rows"), ("rewards", "right_total, tool_calls"), ("tools", "price_of")),
            code='''\
SYSTEM_PROMPT = "Look the prices up with the tool. Answer with a number alone."


def load_environment(
    num_train: int = 200, num_eval: int = 50, seed: int = 0, max_turns: int = 10
) -> vf.Environment:
    """Make the environment; the same arguments give the same questions."""
    rng = random.Random(seed)
    taken: set[str] = set()
    # the questions to evaluate on are drawn first: they stay when num_train changes
    eval_rows = make_rows(num_eval, rng, taken)
    return vf.ToolEnv(
        tools=[price_of],
        dataset=make_rows(num_train, rng, taken),
        eval_dataset=eval_rows,
        system_prompt=SYSTEM_PROMPT,
        rubric=vf.Rubric([right_total, tool_calls], weights=[1.0, 0.0]),
        max_turns=max_turns,
    )
''',
        ),
    ),
    arguments=(
        ("num_train", "200", "questions to train on"),
        ("num_eval", "50", "questions to evaluate on, none of them trained on"),
        ("seed", "0", "chooses the questions"),
        ("max_turns", "10", "answers of the policy in one rollout, with or without a tool call"),
    ),
    rewards=(
        ("right_total", "1 where the last message is the right number, else 0. Weight 1."),
        ("tool_calls", "how often a tool was called. Weight 0: it is only reported."),
    ),
)

TASKS: Mapping[str, Task] = {"single-turn": _SORTING, "multi-turn": _GUESSING, "tool": _SHOPPING}
"""By kind."""
