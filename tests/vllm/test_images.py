"""Images against a real vLLM: dialogues that show some are trained on what it has seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from checks import Showing
from families import Family


def test_log_probs_of_dialogues_with_images_agree_before_and_after_a_push(
    launch: Callable[..., Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    seeing = Family("Qwen3-VL").write_with_images(tmp_path / "seeing")
    server = launch(seeing, "--limit-mm-per-prompt", '{"image": 3, "video": 0}')
    trainer = make_trainer(seeing, Showing(), server.url, max_images=3, max_completion_length=6)
    trainer.keeps_logps = True
    trainer.train()
    server.stop()
    assert trainer.largest_difference() < 1e-3
    assert max(trainer.logged("sampling/probe_difference")) < 1e-3
    assert {len(names) for batch in trainer.seen for names in batch.get("images", ())} >= {3}
