"""report.html of a training run in a real browser: it draws, answers the mouse, and runs nothing of a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import training_runs as runs

from verifiers.reports.server import RunServer
from verifiers.reports.training_run import write_training_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def long_run(directory: Path, text: str = "said") -> Path:
    steps = [runs.line(step, reward=step / 100) for step in range(1, 101)]
    samples = [runs.sample(step, 7, f"{text} at {step}", followed=True) for step in (1, 51, 100)]
    return Path(runs.write_run(directory, steps, samples))


async def words_of(browser: Any, run: Path) -> str:
    await browser.open(f"file://{write_training_report(run)}")
    return str(await browser.run("document.getElementById('app').textContent"))


async def test_the_page_shows_everything_that_its_data_has(browser: Any, tmp_path: Path) -> None:
    steps = [runs.line(step, failures={"SandboxError: no room": 2} if step == 7 else {}) for step in range(1, 31)]
    no_signal = {"rows/trained": 0.0, "rollouts/with_advantage": 0.0, "reward/min": 0.0, "reward/max": 0.0}
    steps = [one | no_signal for one in steps]
    evaluation = {"step": 20, "steps": 0, "eval_reward": 0.625, "eval_reward_stderr": 0.05}
    shown = await words_of(browser, runs.write_run(tmp_path, [*steps, evaluation], [runs.sample(3, 12)]))
    for words in (
        "Learns nothing: every reward was 0 (the reward was never met) over the last 30 blocks.",
        "Rollout-bound: the trainer waited 71 % of the time",
        "max_concurrent above 64",
        "30 of 100",
        "0.625 ± 0.050",
        "11.50 GiB",
        "torch's allocations on cuda:0",
        "SandboxError: no room",
        "batch plan   prompts",
        "question 12",
        "advantage −1.500",
        "overlap ratio1.00",
        "training 0.669",
    ):
        assert words in shown, words
    assert browser.errors == []


async def test_the_mouse_tells_the_values_of_one_step_in_all_charts(browser: Any, tmp_path: Path) -> None:
    await browser.open(f"file://{write_training_report(long_run(tmp_path / 'run'))}")
    assert await browser.run("document.querySelectorAll('figure.chart svg').length") > 6
    value = "document.querySelector('figure.chart .value').textContent"
    assert await browser.run(value) == "1"
    await browser.run(
        "(() => { const drawing = document.querySelector('figure.chart svg');"
        "const box = drawing.getBoundingClientRect();"
        "const x = box.left + box.width * (46 + 0.5 * (420 - 8 - 46)) / 420;"
        "drawing.dispatchEvent(new PointerEvent('pointermove', {clientX: x, clientY: box.top + 40})); })()"
    )
    await browser.until(f"{value} === '0.5'")
    labels = "[...document.querySelectorAll('figure.chart .at')].map(label => label.textContent)"
    assert set(await browser.run(labels)) == {"step 50"}
    await browser.run("document.querySelector('figure.chart svg').dispatchEvent(new PointerEvent('pointerleave'))")
    await browser.until(f"{value} === '1'")
    assert browser.errors == []


async def test_one_step_of_a_prompt_is_shown_at_a_time(browser: Any, tmp_path: Path) -> None:
    await browser.open(f"file://{write_training_report(long_run(tmp_path / 'run'))}")
    shown = "[...document.querySelectorAll('.panel')].filter(panel => panel.offsetParent).map(p => p.textContent)"
    (panel,) = await browser.run(shown)
    assert "said at 100" in panel
    await browser.run("document.querySelector('.strip button').click()")
    (panel,) = await browser.run(shown)
    assert "said at 1" in panel
    assert "said at 100" not in panel
    await browser.run("document.querySelector('.strip button').focus()")
    await browser.key("ArrowRight")
    assert "said at 51" in (await browser.run(shown))[0]
    assert browser.errors == []


@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
async def test_the_page_is_no_wider_than_the_window(browser: Any, tmp_path: Path, width: int, dark: bool) -> None:
    await browser.size(width, 800, dark)
    await browser.open(f"file://{write_training_report(long_run(tmp_path / 'run', 'wide' * 200))}")
    assert await browser.run("document.documentElement.scrollWidth <= window.innerWidth")
    assert browser.errors == []


async def test_what_a_model_wrote_does_not_run(browser: Any, tmp_path: Path) -> None:
    run = runs.write_run(
        tmp_path / "run",
        [runs.line(1, failures={runs.HOSTILE: 1}, **{f"rewards/{runs.HOSTILE}/mean": 0.5, "rewards/b/mean": 1.0})],
        [runs.sample(1, 1, runs.HOSTILE)],
        env=runs.HOSTILE,
        stopped_by=runs.HOSTILE,
    )
    page = write_training_report(run)
    await browser.open(f"file://{page}")
    assert await browser.run("globalThis.canary === undefined")
    assert await browser.run("document.querySelectorAll('img, iframe').length") == 0
    assert {url for url in browser.requests if not url.startswith("about:")} == {f"file://{page}"}
    assert browser.errors == []


async def test_the_page_of_vf_view_follows_a_run_and_keeps_the_step_that_was_chosen(
    browser: Any, tmp_path: Path
) -> None:
    run = long_run(tmp_path / "run")
    server = RunServer(tmp_path)
    await server.start()
    try:
        await browser.open(f"{server.url}run/run/")
        await browser.run("document.querySelector('.strip button').click()")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(runs.line(101, reward=0.875)) + "\n")
        await browser.until("document.querySelector('.head').textContent.includes('101 of 100')")
        assert await browser.run("document.querySelector('figure.chart .value').textContent") == "0.875"
        assert await browser.run("document.querySelector('.strip button').getAttribute('aria-pressed')") == "true"
        assert "said at 1" in await browser.run("document.querySelector('.panel').textContent")
    finally:
        await server.close()
