"""TRL's own GRPOTrainer, which generates with transformers in its own process."""

from __future__ import annotations

import time
from typing import Any

import torch
import trl
from common import Told, arguments, environment, graded, grades_of, peft_config, settings
from transformers import AutoTokenizer, PrinterCallback
from transformers.trainer_utils import get_last_checkpoint


class Remote(trl.GRPOTrainer):
    """A trainer with the latency of a remote server: each generation ends `latency_s` later, which costs no CPU."""

    latency_s = 0.0

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        generated = super()._generate(*args, **kwargs)
        time.sleep(self.latency_s)
        return generated


def main() -> None:
    asked = arguments()
    torch.set_num_threads(asked["threads"])
    rows = environment(asked).get_dataset()
    # its own dictionaries of empty values would be read as messages
    rows = rows.select_columns(["prompt", "answer"]).add_column(
        "question", [str(p[-1]["content"]) for p in rows["prompt"]]
    )
    grades = grades_of(asked)

    def reward(completions: list[Any], question: list[str], answer: list[str], **_: Any) -> list[float | None]:
        found: list[float | None] = []
        for completion, prompt, right in zip(completions, question, answer, strict=True):
            true = graded(completion[0]["content"], right, asked)
            if grades is None or asked.get("failing") == "raises":
                found.append(true if grades is None else grades.reward(prompt, true))
            else:
                # None is TRL's way to say that a reward could not be had
                found.append(None if grades.note(prompt, true) else true)
        return found

    args = trl.GRPOConfig(**settings(asked))
    trainer = Remote(
        model=asked["model"],
        reward_funcs=reward,
        args=args,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(asked["model"], padding_side="left"),
        peft_config=peft_config(asked),
        callbacks=[Told(asked["target"], asked["window"])],
    )
    trainer.latency_s = asked["latency_s"]
    trainer.remove_callback(PrinterCallback)
    # unlike ours, it raises where there is no checkpoint yet
    trainer.train(
        resume_from_checkpoint=get_last_checkpoint(asked["output_dir"]) if asked.get("save_steps") else None
    )


if __name__ == "__main__":
    main()
