"""report.html of a training run in a real browser: it draws, answers the mouse, and runs nothing of a model."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from verifiers.train.watching.report import write_training_report

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


def load(name: str, path: Path) -> Any:
    """What another test module shares, found by its path: tests are no package."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


HERE = Path(__file__).parent
runs = load("training_report_runs", HERE / "test_report.py")
pages = load("browser_pages", HERE.parents[1] / "evals" / "viewer" / "conftest.py")


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Any]:
    async with pages.opened_browser(tmp_path / "profile") as page:
        yield page


def long_run(directory: Path, text: str = "said") -> Path:
    steps = [runs.line(step, reward=step / 100) for step in range(1, 101)]
    samples = [runs.sample(step, 7, f"{text} at {step}", followed=True) for step in (1, 51, 100)]
    return Path(runs.write_run(directory, steps, samples))


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


async def test_a_step_that_is_looked_at_keeps_the_colour_of_its_reward(browser: Any, tmp_path: Path) -> None:
    samples = [
        {**runs.sample(step, 7, followed=True), "mean_reward": mean} for step, mean in ((1, 0.0), (2, 1.0), (3, 0.0))
    ]
    await browser.open(f"file://{write_training_report(runs.write_run(tmp_path / 'run', [runs.line(1)], samples))}")
    look = (
        "[...document.querySelectorAll('.strip button')].map(button => { const is = getComputedStyle(button);"
        "return [is.backgroundColor, is.opacity, is.outlineStyle]; })"
    )
    first, second, third = await browser.run(look)
    assert first[:2] == third[:2] != second[:2]
    assert (first[2], third[2]) == ("none", "solid")
    await browser.run("document.querySelector('.strip button').click()")
    pressed, _, left = await browser.run(look)
    assert pressed[:2] == left[:2] == first[:2]
    assert pressed[2] == "solid"


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
