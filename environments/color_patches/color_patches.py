"""Name the color of a noisy patch, which stands in the question or is what a tool shows."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from PIL import Image

import verifiers as vf

__all__ = ["COLORS", "PatchToolEnv", "load_environment", "patch"]

COLORS = {"red": (200, 60, 60), "green": (60, 200, 60), "blue": (60, 60, 200), "yellow": (200, 200, 60)}
QUESTION = "Which color? Answer red, green, blue or yellow."
ASKED_TO_LOOK = f"Look at the patch. {QUESTION}"
SIDE = 24
MOST = 20_000


def patch(color: Sequence[int], noise: int, rng: random.Random) -> Image.Image:
    """Return a square of a color, to which each channel of each pixel has noise added.

    Args:
        noise: largest deviation, in levels of 0 to 255.
    """
    drawn = rng.randbytes(SIDE * SIDE * 3)
    values = (color[place % 3] + (byte - 127.5) / 127.5 * noise for place, byte in enumerate(drawn))
    return Image.frombytes("RGB", (SIDE, SIDE), bytes(min(255, max(0, round(value))) for value in values))


class PatchToolEnv(vf.StatefulToolEnv):
    """An environment whose patch is seen by the tool `look`."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(max_turns=3, **kwargs)
        self.add_tool(look, args_to_skip=["url"])

    async def update_tool_args(
        self, tool_name: str, tool_args: dict[str, Any], messages: vf.Messages, state: vf.State, **kwargs: Any
    ) -> dict[str, Any]:
        return {**tool_args, "url": state["info"]["url"]}


def look(url: str) -> list[dict[str, Any]]:
    """Look at the patch."""
    return [{"type": "image_url", "image_url": {"url": url}}]


def named(parser: vf.Parser, completion: vf.Messages, answer: str) -> float:
    """Return 1.0 where the last answer is the color's name and nothing else; `Red.` is `red`."""
    return float((parser.parse_answer(completion) or "").strip().removesuffix(".").lower() == answer)


def load_environment(
    num_train: int = 1000, num_eval: int = 100, noise: int = 60, by_tool: bool = False, seed: int = 0
) -> vf.Environment:
    """Build the environment.

    Args:
        num_train: training patches.
        num_eval: evaluation patches; they do not depend on `num_train`.
        noise: largest deviation of a pixel's channel from the patch's color, in levels of 0 to 255.
        by_tool: the patch is seen by the tool `look`; otherwise it stands in the question.
        seed: chooses colors and noise.
    """
    if not (1 <= num_train <= MOST and 1 <= num_eval <= MOST and 0 <= noise <= 255):
        raise vf.ConfigError(
            f"num_train={num_train} and num_eval={num_eval} must be 1 to {MOST:,}, and noise={noise} 0 to 255."
        )
    train, evaluation = (
        _rows(number, noise, by_tool, f"{seed} {name}") for name, number in (("train", num_train), ("eval", num_eval))
    )
    kind = PatchToolEnv if by_tool else vf.SingleTurnEnv
    parser = vf.MaybeThinkParser()
    return kind(dataset=train, eval_dataset=evaluation, parser=parser, rubric=vf.Rubric(funcs=[named], parser=parser))


def _rows(number: int, noise: int, by_tool: bool, seed: str) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for place in range(number):
        # as many of each color
        name = list(COLORS)[place % len(COLORS)]
        image = vf.image_part(patch(COLORS[name], noise, rng))
        content: Any = ASKED_TO_LOOK if by_tool else [image, {"type": "text", "text": QUESTION}]
        info = {"url": image["image_url"]["url"]} if by_tool else {}
        rows.append({"prompt": [{"role": "user", "content": content}], "answer": name, "info": info})
    rng.shuffle(rows)
    return rows
