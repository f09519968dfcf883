"""A model for `sdk_agent.py` to begin with: it calls the tool, with the right code for about four articles in ten.

    python examples/agents/start_model.py

Makes the small model of `examples/demo` and shows it the conversations of some training articles. Writes
`runs/agents/start`, in about three minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch
from sdk_agent import NAMES, NUM_EVAL, price

from verifiers.train.tiny_model.char_model import make_model
from verifiers.train.tiny_model.warm_start import warm_start

SHOWN = 200
TOOL = {
    "type": "function",
    "function": {"name": price.name, "description": price.description, "parameters": price.params_json_schema},
}


def shown_names() -> list[str]:
    return NAMES[NUM_EVAL : NUM_EVAL + SHOWN]


def question(name: str) -> dict[str, Any]:
    return {"role": "user", "content": f"Price of {name}?"}


def call(name: str) -> str:
    return f'<tool_call>{{"name": "price", "arguments": {json.dumps({"code": name[::-1]})}}}</tool_call>'


def conversations(names: list[str], rng: random.Random) -> list[tuple[list[dict[str, Any]], str]]:
    """Return what is shown: the right call for each name, and five times a result that is repeated.

    The results are made up. Those of few names would be learned by heart, instead of how to repeat one.
    """
    shown = [([question(name)], call(name)) for name in names]
    for name in names * 5:
        result = str(rng.randint(10, 99))
        called = {"role": "assistant", "content": call(name)}
        shown.append(([question(name), called, {"role": "tool", "content": result}], result))
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/agents/start"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    shown = conversations(shown_names(), random.Random(args.seed))
    eval_pairs = [([question(name)], call(name)) for name in NAMES[:NUM_EVAL]]
    with tempfile.TemporaryDirectory() as untrained:
        make_model(untrained, seed=args.seed)
        made = warm_start(
            untrained, args.output_dir, shown=shown, eval_pairs=eval_pairs, tools=[TOOL], seed=args.seed
        )
    print(f"{args.output_dir}: {made.accuracy:.0%} of the first calls are right, after {made.seconds:.0f} s")


if __name__ == "__main__":
    main()
