"""Problems that are long by hand and short in Python: a sandboxed interpreter as a tool, exact answers."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable

import verifiers as vf

__all__ = ["load_environment"]

SYSTEM_PROMPT = (
    "Solve the problem. You may run Python code with the tool; what it defines stays there for later calls. "
    "When you know the result, write it exactly, as \\boxed{...}, with nothing after it."
)

Problem = tuple[str, str]
"""A question, and its answer as a whole number or a fraction."""


def boxed(text: str) -> str:
    r"""Return the text in the last `\boxed{...}`; "" where that is missing, not closed, or of more than two numbers.

    A number or a fraction has two at most. A longer expression may be the question's own, which equals its answer.
    """
    found = vf.extract_boxed_answer(text, strict=True)
    numbers = re.findall(r"\d+(?:\.\d+)?", re.sub(r"\\[,;:! ]|[{},\s]", "", found))
    return found if len(numbers) <= 2 else ""


def prime_factors(number: int) -> list[int]:
    """Return the distinct prime factors, in rising order."""
    found = []
    factor = 2
    while factor * factor <= number:
        if number % factor == 0:
            found.append(factor)
            while number % factor == 0:
                number //= factor
        factor += 1
    return [*found, number] if number > 1 else found


def largest_prime_factor(rng: random.Random) -> Problem:
    number = rng.randint(10**6, 10**8)
    return f"What is the largest prime factor of {number}?", str(prime_factors(number)[-1])


def last_digits(rng: random.Random) -> Problem:
    base, exponent, modulus = rng.randint(11, 999), rng.randint(1_000, 99_999), rng.randint(1_000, 9_999)
    return f"What is the remainder of {base}^{exponent} divided by {modulus}?", str(pow(base, exponent, modulus))


def multiples(rng: random.Random) -> Problem:
    limit, (a, b) = rng.randint(2_000, 90_000), rng.sample(range(3, 60), 2)

    def total(step: int) -> int:
        count = (limit - 1) // step
        return step * count * (count + 1) // 2

    answer = total(a) + total(b) - 2 * total(math.lcm(a, b))
    return f"What is the sum of the positive integers below {limit} divisible by {a} or {b}, but not both?", str(
        answer
    )


def coins(rng: random.Random) -> Problem:
    amount, values = rng.randint(200, 900), sorted(rng.sample(range(2, 20), 4))
    ways = [1] + [0] * amount
    for value in values:
        for total in range(value, amount + 1):
            ways[total] += ways[total - value]
    listed = ", ".join(map(str, values))
    return f"In how many ways can {amount} be paid with coins of {listed}, any number of each?", str(ways[amount])


def harmonic(rng: random.Random) -> Problem:
    first, count = rng.randint(2, 40), rng.randint(4, 9)
    numbers = range(first, first + count)
    whole = math.lcm(*numbers)
    top = sum(whole // number for number in numbers)
    shared = math.gcd(top, whole)
    question = f"What is 1/{first} + 1/{first + 1} + ... + 1/{first + count - 1} as one fraction in lowest terms?"
    return question, f"\\frac{{{top // shared}}}{{{whole // shared}}}"


KINDS: list[Callable[[random.Random], Problem]] = [largest_prime_factor, last_digits, multiples, coins, harmonic]


def load_environment(
    num_train: int = 500, num_eval: int = 100, seed: int = 0, max_turns: int = 6, timeout_s: float = 10.0
) -> vf.Environment:
    """Build the environment.

    Args:
        num_train: training problems.
        num_eval: evaluation problems; none of them is a training problem, and they do not depend on `num_train`.
        seed: chooses the problems.
        max_turns: messages of the policy in one rollout.
        timeout_s: seconds that one run of its code may take.

    Raises:
        vf.ConfigError: not between 1 and 20,000 problems.
    """
    if min(num_train, num_eval) < 1 or num_train + num_eval > 20_000:
        raise vf.ConfigError(
            f"num_train={num_train} and num_eval={num_eval} must be 1 or more, and at most 20000 together."
        )
    rng = random.Random(seed)
    problems: dict[str, str] = {}
    while len(problems) < num_eval + num_train:
        question, answer = rng.choice(KINDS)(rng)
        problems[question] = answer
    rows = [{"question": question, "answer": answer} for question, answer in problems.items()]
    parser = vf.Parser(extract_fn=boxed)
    rubric = vf.RubricGroup([vf.MathRubric(parser=parser), vf.ToolRubric(tools=["python"])])
    return vf.PythonEnv(
        max_turns=max_turns,
        timeout_per_command_s=timeout_s,
        dataset=rows[num_eval:],
        eval_dataset=rows[:num_eval],
        system_prompt=SYSTEM_PROMPT,
        parser=parser,
        rubric=rubric,
    )
