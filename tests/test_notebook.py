"""Environments and results as a notebook shows them."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import verifiers as vf
from verifiers.testing import FakeOpenAIServer

HOSTILE = "<script>alert(1)</script>"


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def shown(value: Any) -> Tags:
    html = value._repr_html_()
    # colours of its own would be unreadable in a dark or in a light notebook
    assert "color" not in html
    assert len(html) < 20_000
    tags = Tags()
    tags.feed(html)
    assert set(tags.names) <= {"b", "div", "table", "td", "th", "tr"}
    return tags


def right(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def hostile_env(rows: int = 8) -> vf.Environment:
    dataset = [{"question": f"{HOSTILE} {n}?", "answer": "4"} for n in range(rows)]
    return vf.SingleTurnEnv(
        dataset=dataset, eval_dataset=dataset, system_prompt=HOSTILE, rubric=vf.Rubric([right], [2])
    )


def test_results_show_means_and_the_first_rollouts_as_text() -> None:
    with FakeOpenAIServer(["4", HOSTILE + "x" * 1000] * 4) as server:
        results = hostile_env().evaluate_sync(server.url, "fake", max_concurrent=1)
    tags = shown(results)
    assert "8 rollouts, reward 1.000, right 0.500" in tags.text
    assert f"{HOSTILE} 0?" in tags.text
    assert f"{HOSTILE}{'x' * (240 - len(HOSTILE))} ..." in tags.text
    assert "3 more" in tags.text


def test_results_name_the_errors_of_failed_rollouts() -> None:
    state = vf.State(error=vf.ToolError("no such tool"))
    results = vf.GenerateOutputs(
        prompt=["1?", "2?"], completion=["", "2"], answer=["1", "2"], state=[state, vf.State()], reward=[0.0, 1.0]
    )
    tags = shown(results)
    assert "2 rollouts, reward 0.500, 1 failed" in tags.text
    assert "ToolError: no such tool" in tags.text
    assert "0.000" not in tags.text


def test_a_score_that_is_missing_is_in_no_mean() -> None:
    results = vf.GenerateOutputs(
        prompt=["1?", "2?"], completion=["1", "2"], reward=[None, 1.0], metrics={"right": [0.5, None]}
    )
    assert "2 rollouts, reward 1.000, right 0.500" in shown(results).text


def test_an_environment_shows_its_rows_prompt_and_rewards() -> None:
    tags = shown(hostile_env())
    for text in ("SingleTurnEnv", "training rows\n8", f"first prompt\n{HOSTILE} 0?", "rewards\nright x 2"):
        assert text in tags.text


def test_an_environment_shows_its_tools_and_makes_no_dataset_for_it() -> None:
    def rows() -> Any:
        raise AssertionError("the dataset was made")

    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    tags = shown(vf.ToolEnv(dataset=rows, tools=[add], rubric=vf.Rubric([right]), max_turns=3))
    for text in ("training rows\nmade when first used", "eval rows\nnone", "tools\nadd", "turns at most\n3"):
        assert text in tags.text
