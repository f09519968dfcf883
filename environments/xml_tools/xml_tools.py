"""Tools through XML tags in the text, for policies and servers without native tool calls: what does an order cost?"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import verifiers as vf

__all__ = ["XMLToolEnv", "load_environment"]

GOODS = ["basket", "bowl", "candle", "chair", "clock", "cushion", "drum", "kettle", "lamp", "mirror", "rug", "vase"]
PARSER = vf.XMLParser([("tool", "answer")])

Shop = Mapping[str, Mapping[str, int]]


def price(shop: Shop, item: str) -> int:
    """Return the price of one piece of an item, in cents."""
    return shop[item]["price"]


def discount(shop: Shop, item: str) -> int:
    """Return how many cents each piece of an item costs less when three or more pieces of it are bought."""
    return shop[item]["discount"]


def stock(shop: Shop, item: str) -> int:
    """Return how many pieces of an item the shop has."""
    return shop[item]["stock"]


class XMLToolEnv(vf.MultiTurnEnv):
    """An environment of tools in XML: the policy writes a `<tool>`, receives a `<result>`, and ends with `<answer>`.

    A call is `<tool>{"name": ..., "args": {...}}</tool>`.

    Args:
        tools: functions whose first argument is the row's shop, which the policy does not see.
        max_turns: messages of the policy in one rollout.
    """

    def __init__(self, tools: Sequence[Callable[..., Any]], max_turns: int = 8, **kwargs: Any) -> None:
        self.tools = {tool.__name__: tool for tool in tools}
        lines = [
            "You are a shop assistant. The shop's data are behind these tools:",
            *(f"- {name}(item): {inspect.getdoc(tool)}" for name, tool in self.tools.items()),
            "Call one in each message, and wait for its <result>:",
            '<tool>{"name": "...", "args": {"item": "..."}}</tool>',
            "When you know the answer, write it as a whole number of cents: <answer>...</answer>.",
        ]
        super().__init__(max_turns=max_turns, system_prompt="\n".join(lines), **kwargs)

    async def setup_state(self, state: vf.State, **kwargs: Any) -> vf.State:
        state["tool_calls"] = state["tool_errors"] = 0
        return state

    async def env_response(self, messages: vf.Messages, state: vf.State, **kwargs: Any) -> list[vf.ChatMessage]:
        said = PARSER.parse(state["completion"][-1]["content"] or "")
        if said.tool is None:
            return [{"role": "user", "content": "Write either <tool>...</tool> or <answer>...</answer>."}]
        state["tool_calls"] += 1
        try:
            result = self.call(said.tool, state["info"]["shop"])
        except ValueError as error:
            state["tool_errors"] += 1
            result = f"error: {error}"
        return [{"role": "user", "content": f"<result>{result}</result>"}]

    def call(self, text: str, shop: Shop) -> Any:
        """Return the result of the tool named in `text`; raise ValueError with a sentence for the policy."""
        try:
            request = json.loads(text)
            tool, arguments = self.tools[request["name"]], dict(request.get("args", {}))
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
            raise ValueError(f"a call is JSON with name (one of {', '.join(self.tools)}) and args") from None
        try:
            inspect.signature(tool).bind(shop, **arguments)
        except TypeError as error:
            raise ValueError(f"{tool.__name__}: {error}") from None
        if arguments["item"] not in list(shop):
            raise ValueError(f"the shop has only {', '.join(shop)}")
        return tool(shop, **arguments)

    @vf.stop
    async def answered(self, state: vf.State) -> bool:
        return final_answer(state["completion"]) is not None


def final_answer(completion: vf.Messages) -> str | None:
    """Return the answer in the newest message, if the policy wrote it.

    A message that calls a tool too is not an answer yet: what it answers was written before the result was known.
    """
    newest = PARSER.get_assistant_messages(completion[-1:])
    said = PARSER.parse(newest[0]["content"] or "", last=True) if newest else None
    return said.answer if said and said.tool is None else None


def right_answer(completion: vf.Messages, answer: str) -> float:
    """Return 1.0 where the rollout ended with the right amount; separators of thousands do not count."""
    return float((final_answer(completion) or "").replace(",", "") == answer)


def tool_calls(state: vf.State) -> float:
    return float(state["tool_calls"])


def tool_errors(state: vf.State) -> float:
    return float(state["tool_errors"])


def make_row(rng: random.Random) -> dict[str, Any]:
    """Make a shop of six goods, an order of two of them, and its total."""
    shop = {
        item: {"price": rng.randint(200, 9900), "discount": rng.randint(5, 150), "stock": rng.randint(1, 40)}
        for item in rng.sample(GOODS, 6)
    }
    first, second = rng.sample(list(shop), 2)
    order = {first: rng.randint(3, 9), second: rng.randint(1, 2)}
    cost = sum(
        pieces * (shop[item]["price"] - (shop[item]["discount"] if pieces >= 3 else 0))
        for item, pieces in order.items()
    )
    wanted = " and ".join(f"{pieces} x {item}" for item, pieces in order.items())
    return {
        "question": f"A customer wants {wanted}. How many cents is that?",
        "answer": str(cost),
        # as text: a table would give every row's shop the goods of all others
        "info": json.dumps({"shop": shop}),
    }


def load_environment(num_train: int = 1000, num_eval: int = 200, seed: int = 0, max_turns: int = 8) -> vf.Environment:
    """Build the environment.

    Args:
        num_train: training orders.
        num_eval: evaluation orders; none of them is a training order, and they do not depend on `num_train`.
        seed: chooses the orders and the shops.
        max_turns: messages of the policy in one rollout; three calls and an answer are enough.

    Raises:
        vf.ConfigError: not between 1 and 1,500 orders: that many the goods and pieces surely give.
    """
    if min(num_train, num_eval) < 1 or num_train + num_eval > 1500:
        raise vf.ConfigError(
            f"num_train={num_train} and num_eval={num_eval} must be 1 or more, and at most 1500 together."
        )
    rng = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < num_eval + num_train:
        row = make_row(rng)
        rows.setdefault(row["question"], row)
    shuffled = list(rows.values())
    return XMLToolEnv(
        [price, discount, stock],
        max_turns=max_turns,
        dataset=shuffled[num_eval:],
        eval_dataset=shuffled[:num_eval],
        parser=PARSER,
        rubric=vf.Rubric(
            funcs=[right_answer, tool_calls, tool_errors, PARSER.get_format_reward_func()],
            weights=[1.0, 0.0, 0.0, 0.0],
            parser=PARSER,
        ),
    )
