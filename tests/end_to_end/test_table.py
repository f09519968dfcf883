"""TRL's table of completions shows the environment's rollouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import tiny_world


def test_log_completions_saves_the_scored_rollouts_of_each_step(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(tiny_world.single_turn(), log_completions=True)
    trainer.train()
    table = pd.read_parquet(Path(trainer.args.output_dir) / "completions" / "completions_00002.parquet")
    assert len(table) == 8
    assert set(table["step"]) == {2}
    newest = trainer.last_block.rollouts
    assert list(table["vowels"]) == [rollout.metrics["vowels"] for rollout in newest]
    assert [text[0]["content"] for text in table["completion"]] == [r.completion[0]["content"] for r in newest]
