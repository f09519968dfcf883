"""TRL's own GRPOTrainer, which generates with transformers in its own process."""

from __future__ import annotations

import time
from typing import Any

import torch
import trl
from common import SETTINGS, Told, arguments, environment
from transformers import AutoTokenizer, PrinterCallback


class Remote(trl.GRPOTrainer):
    """The same with the way to a remote server: each generation ends `latency_s` later, which costs no CPU."""

    latency_s = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        time.sleep(self.latency_s)
        return generated


def main() -> None:
    asked = arguments()
    torch.set_num_threads(asked["threads"])
    env = environment()
    rows = env.get_dataset().select_columns(["prompt", "answer"])

    def exact(completions: list[Any], answer: list[str], **_: Any) -> list[float]:
        said = [completion[0]["content"].strip() for completion in completions]
        return [float(text == right.strip()) for text, right in zip(said, answer, strict=True)]

    args = trl.GRPOConfig(
        output_dir=asked["output_dir"], seed=asked["seed"], max_steps=asked["max_steps"], **SETTINGS
    )
    trainer = Remote(
        model=asked["model"],
        reward_funcs=exact,
        args=args,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(asked["model"], padding_side="left"),
        callbacks=[Told(asked["target"], asked["window"])],
    )
    trainer.latency_s = asked["latency_s"]
    trainer.remove_callback(PrinterCallback)
    trainer.train()


if __name__ == "__main__":
    main()
