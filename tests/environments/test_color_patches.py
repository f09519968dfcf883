"""color_patches: colors that can be told apart by their mean, and the form in which a tool shows the patch."""

from __future__ import annotations

import random
from typing import Any

import color_patches
import pytest
import shelf
from PIL import ImageStat
from shelf import Turn
from shelf_policies import COLOR_PATCHES

import verifiers as vf
from verifiers.images import image_urls


@pytest.mark.parametrize("name", color_patches.COLORS)
def test_noise_leaves_the_mean_and_moves_the_pixels(name: str) -> None:
    image = color_patches.patch(color_patches.COLORS[name], 60, random.Random(0))
    found = ImageStat.Stat(image)
    assert all(abs(one - other) < 8 for one, other in zip(found.mean, color_patches.COLORS[name], strict=True))
    assert min(found.stddev) > 20


def test_the_name_may_be_written_as_a_sentence_and_not_among_others() -> None:
    answers = ["red", "Red.", " RED\n", "red or blue", "redred", "Red..", ""]
    rewards = [
        color_patches.named(vf.MaybeThinkParser(), [{"role": "assistant", "content": said}], "red")
        for said in answers
    ]
    assert rewards == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


def test_by_tool_the_patch_is_seen_in_the_tools_answer_alone() -> None:
    def looks(turn: Turn) -> dict[str, Any] | str:
        assert list(image_urls(turn.row["prompt"])) == []
        return {"tool_calls": [{"name": "look", "arguments": {}}]} if turn.number == 0 else mean_color(turn)

    mean_color = COLOR_PATCHES["oracle"]
    env = vf.load_environment("color-patches", by_tool=True)
    rollouts = shelf.play(env, looks, prompts=8)
    assert [one.reward for one in rollouts] == [1.0] * 8
    assert all(len(list(image_urls(one.completion))) == 1 for one in rollouts)
    # nobody who did not look knows it
    assert shelf.reward_of(env, lambda turn: "red", prompts=100) <= 0.3
