"""What counts as a finished run."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from verifiers.data.batch_plan import make_plan
from verifiers.train.checkpoint.run_directory import finished_steps, note_saved

SHORT = make_plan(per_device_train_batch_size=4, num_generations=4, max_steps=4, num_prompts=8)


def test_what_was_finished_with_another_seed_other_rows_or_another_model_is_not_this_run(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number}", "answer": ""} for number in range(8)]
    (tmp_path / "run.json").write_text(json.dumps({"status": "finished", "ended": 1.0}))
    note_saved(tmp_path, 4, SHORT, rows, "start")
    assert finished_steps(tmp_path, dataclasses.replace(SHORT, max_steps=2), rows, "start") == 4
    assert finished_steps(tmp_path, SHORT) == 4
    for other in (
        (dataclasses.replace(SHORT, seed=7), rows, "start"),
        (SHORT, rows[::-1], "start"),
        (SHORT, rows, "b"),
    ):
        assert finished_steps(tmp_path, *other) is None
