"""The page in a real browser. Screenshots of all views are left in the test's directory, to be looked at."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import training_runs
from training_runs import store

from verifiers.reports.evaluation import write_comparison_report, write_evaluation_report
from verifiers.reports.server import RunServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]

HOSTILE = (
    "</script><script>globalThis.canary = 1</script><img src=x onerror='globalThis.canary = 2'>"
    "<svg onload='globalThis.canary = 3'></svg><iframe srcdoc='<script>parent.canary = 4</script>'></iframe>"
    "<a href='javascript:globalThis.canary=5'>click</a><style>body{display:none}</style>"
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>\x1b[31mred\x1b[0m\u202e\u2028{{7*7}}${7*7}"
)
VISIBLE_ROWS = "[...document.querySelectorAll('.list .row:not([hidden])')]"
SELECTED = "document.querySelector('[role=option][aria-selected=true] .row-id')?.textContent"
OPENED = "document.querySelector('.opened .detail h3')?.textContent"


async def open_run(browser: Any, run: Path, at: str = "") -> None:
    await browser.open(f"file://{write_evaluation_report(run)}{at}")


async def choose(browser: Any, label: str, value: str) -> None:
    await browser.run(
        f"(() => {{ const field = document.querySelector('[aria-label=\"{label}\"]');"
        f"field.value = {json.dumps(value)};"
        "field.dispatchEvent(new Event('input')); field.dispatchEvent(new Event('change')); })()"
    )


async def test_the_overview_shows_numbers_and_four_charts(browser: Any, sums_run: Path) -> None:
    await open_run(browser, sums_run)
    assert await browser.run("document.querySelectorAll('figure svg').length") == 4
    text = await browser.run("document.querySelector('main').textContent")
    for part in ("reward", "pass@k", "provider error", "1 rollout without a reward", "Distribution", "Length"):
        assert part in text
    # a bar of the histogram leads to its rollouts
    await browser.run("document.querySelector('.bar').dispatchEvent(new MouseEvent('click'))")
    values = await browser.run(f"{VISIBLE_ROWS}.map(row => row.querySelector('.row-value').textContent)")
    assert values
    assert set(values) == {"0"}
    assert browser.errors == []


async def test_filters_leave_what_matches(browser: Any, sums_run: Path) -> None:
    await open_run(browser, sums_run, "#rollouts")
    await choose(browser, "Outcome", "provider_error")
    ids = f"{VISIBLE_ROWS}.map(row => row.querySelector('.row-id').textContent)"
    assert await browser.run(ids) == ["0.5"]
    await choose(browser, "Outcome", "")
    await choose(browser, "Search transcripts", "seven-RESULT")
    await browser.until("document.querySelector('.count').textContent === '1 of 320'")
    assert await browser.run(ids) == ["1.1"]
    await choose(browser, "Search transcripts", "")
    await choose(browser, "Order", "long")
    await browser.until("document.querySelector('.count').textContent === '320 of 320'")
    stored = [json.loads(line) for line in (sums_run / "results.jsonl").read_text().splitlines()]
    sorted_rows = sorted(stored, key=lambda row: -row["completion_tokens"])
    tokens = await browser.run(f"{VISIBLE_ROWS}.map(row => parseInt(row.querySelector('.row-tokens').textContent))")
    assert tokens == [row["completion_tokens"] for row in sorted_rows[: len(tokens)]]
    assert browser.errors == []


async def test_a_permalink_opens_a_rollout_with_each_call_beside_its_result(browser: Any, sums_run: Path) -> None:
    await open_run(browser, sums_run, "#rollout=1.1")
    await browser.until(OPENED)
    assert await browser.run(OPENED) == "prompt 1, rollout 1"
    calls = await browser.run("[...document.querySelectorAll('.call')].map(call => call.textContent)")
    assert len(calls) == 2
    assert '"a": 1' in calls[0]
    assert "three-result" in calls[0]
    assert '"a": 3' in calls[1]
    assert "seven-result" in calls[1]
    roles = await browser.run("[...document.querySelectorAll('.message h4')].map(one => one.textContent)")
    assert roles == ["system", "user", "assistant", "tool (its call is not here)", "assistant"]
    reasoning = "[...document.querySelectorAll('.message details')].find(one => /reasoning/.test(one.textContent))"
    assert await browser.run(f"{reasoning}.open") is False
    assert "Two sums are needed." in await browser.run(f"{reasoning}.textContent")
    await browser.open(f"file://{sums_run}/report.html#rollout=nothing.like.it")
    assert "is not on this page" in await browser.run("document.querySelector('.top').textContent")


async def test_everything_can_be_done_from_the_keyboard(browser: Any, sums_run: Path) -> None:
    await open_run(browser, sums_run)
    await browser.key("2")
    for key in "jjj":
        await browser.key(key)
    await browser.key("k")
    assert await browser.run(SELECTED) == "0.1"
    await browser.key("Enter")
    await browser.until(OPENED)
    assert await browser.run("location.hash") == "#rollout=0.1"
    assert await browser.run("document.activeElement.className") == "detail"
    await browser.key("j")
    await browser.until(f"{OPENED} === 'prompt 0, rollout 2'")
    assert await browser.run("location.hash") == "#rollout=0.2"
    await browser.key("g")
    await browser.until(f"{OPENED} === 'prompt 0'")
    assert await browser.run("document.querySelectorAll('.column').length") == 8
    await browser.key("Escape")
    assert await browser.run(f"{OPENED} ?? null") is None
    await browser.key("/")
    assert await browser.run("document.activeElement.type") == "search"
    await browser.key("j")
    assert await browser.run("document.activeElement.value") == "j"
    await browser.key("Escape")
    assert await browser.run("document.activeElement.getAttribute('role')") == "listbox"
    await browser.key("?")
    assert await browser.run("document.querySelector('dialog').open") is True
    await browser.key("Escape")
    await browser.until("!document.querySelector('dialog').open")
    await browser.key("End")
    assert await browser.run(SELECTED) is not None
    assert browser.errors == []


async def test_what_a_model_writes_is_shown_and_never_run(browser: Any, tmp_path: Path, rows: Any) -> None:
    calls = [{"id": HOSTILE, "function": {"name": HOSTILE, "arguments": HOSTILE}}]
    completion = [
        {"role": "assistant", "content": HOSTILE, "reasoning_content": HOSTILE, "tool_calls": calls},
        {"role": "tool", "tool_call_id": HOSTILE, "content": [{"type": "image_url", "image_url": {"url": HOSTILE}}]},
        {"role": HOSTILE, "content": f"<think>{HOSTILE}</think>{HOSTILE}"},
    ]
    texts = dict.fromkeys(("example_id", "prompt", "answer", "error", "task"), HOSTILE)
    made = rows(0, 0, completion=completion, info={HOSTILE: HOSTILE}, **texts, **{HOSTILE: 1.0})
    run = store(tmp_path / "run", [made, made | {"generation": 1}], env=HOSTILE, model=HOSTILE, started=HOSTILE)
    await open_run(browser, run)
    await browser.run("document.querySelectorAll('details').forEach(one => one.open = true)")
    for view in ("2", "Enter", "g", "1"):
        await browser.key(view)
        await browser.run("new Promise(done => setTimeout(done, 50))")
    await browser.key("2")
    await browser.key("j")
    await browser.key("Enter")
    await browser.until(OPENED)
    assert await browser.run("typeof globalThis.canary") == "undefined"
    assert (
        await browser.run(
            "document.querySelectorAll('img, iframe, #app script, #app style, #app a[href^=java]').length"
        )
        == 0
    )
    shown = await browser.run("document.querySelector('.role-assistant pre:last-of-type').textContent")
    assert "<script>globalThis.canary = 1</script>" in await browser.run(
        "document.querySelector('.detail').textContent"
    )
    assert "\u27e8ESC\u27e9[31mred" in await browser.run("document.querySelector('.detail').textContent")
    assert "\u27e8U+202E\u27e9" in await browser.run("document.querySelector('.detail').textContent")
    assert "\x1b" not in shown
    assert [url for url in browser.requests if not url.startswith(("file:", "about:", "data:"))] == []
    await browser.screenshot(tmp_path / "hostile.png")
    # even if an element got in, the policy would keep it from running
    await browser.run(
        "(() => { const script = document.createElement('script'); script.textContent = 'globalThis.canary = 9';"
        "document.body.append(script); const image = document.createElement('div');"
        "image.innerHTML = '<img src=x onerror=\"globalThis.canary = 10\">'; document.body.append(image); })()"
    )
    await browser.run("new Promise(done => setTimeout(done, 100))")
    assert await browser.run("typeof globalThis.canary") == "undefined"


async def test_ten_thousand_rollouts_are_searched_and_only_those_in_sight_are_elements(
    browser: Any, tmp_path: Path, rows: Any
) -> None:
    many = [rows(example, generation) for example in range(1250) for generation in range(8)]
    path = write_evaluation_report(store(tmp_path / "run", many))
    await browser.open(f"file://{path}")
    load_ms = await browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd")
    await browser.key("2")
    frames = await browser.run(
        """new Promise((done) => {
          const list = document.querySelector('.list');
          const frames = [];
          let last = performance.now();
          requestAnimationFrame(function frame(now) {
            frames.push([now - last, list.querySelectorAll('.row').length]);
            last = now;
            list.scrollTop += frames.length % 40 === 0 ? 90000 : 700;
            if (frames.length < 240) requestAnimationFrame(frame);
            else done(frames.slice(1));
          });
        })"""
    )
    p95_ms = sorted(ms for ms, _ in frames)[int(len(frames) * 0.95)]
    started = time.perf_counter()
    await choose(browser, "Search transcripts", "= 3747")
    await browser.until("document.querySelector('.count').textContent === '8 of 10,000'")
    # the times are docs/guides/report.md's, and depend on what else the machine does: `pytest -s` prints them
    print(
        f"\n10,000 rollouts, {path.stat().st_size / 2**20:.1f} MiB: load {load_ms:.0f} ms, "
        f"p95 frame {p95_ms:.1f} ms, search of all transcripts {time.perf_counter() - started:.2f} s"
    )
    assert all(0 < elements < 80 for _, elements in frames)
    assert browser.errors == []


async def test_two_runs_show_their_differences_prompt_by_prompt(browser: Any, tmp_path: Path, rows: Any) -> None:
    one = store(tmp_path / "a", [rows(e, g, reward=0.5) for e in range(6) for g in range(2)], model="a")
    two = store(tmp_path / "b", [rows(e, g, reward=0.25 * e) for e in range(6) for g in range(2)], model="b")
    await browser.open(f"file://{write_comparison_report(one, two, tmp_path / 'two.html')}#prompts")
    shown = await browser.run(
        f"{VISIBLE_ROWS}.map(row => ['.row-id', '.row-value'].map(part => row.querySelector(part).textContent))"
    )
    assert shown[:3] == [["0", "−0.500"], ["1", "−0.250"], ["2", "±0"]]
    await browser.key("j")
    await browser.key("Enter")
    await browser.until(OPENED)
    heads = await browser.run("[...document.querySelectorAll('.column header')].map(one => one.textContent)")
    assert heads == ["Arollout 0reward 0.500", "Brollout 0reward 0", "Arollout 1reward 0.500", "Brollout 1reward 0"]
    await browser.screenshot(tmp_path / "differences.png")
    assert browser.errors == []


async def test_a_live_page_follows_its_run(browser: Any, tmp_path: Path, rows: Any) -> None:
    run = store(
        tmp_path / "evals" / "sums--m" / "1", [rows(0, 0)], num_examples=2, rollouts_per_example=2, summary=None
    )
    server = RunServer(tmp_path / "evals")
    await server.start()
    try:
        await browser.open(f"{server.url}run/sums--m/1/#rollouts")
        assert await browser.run("document.querySelector('.count').textContent") == "1 of 1"
        with (run / "results.jsonl").open("a") as file:
            file.write(json.dumps(rows(0, 1)) + "\n" + json.dumps(rows(1, 1)) + "\n")
        await browser.until("document.querySelector('.count').textContent === '3 of 3'")
        assert "live: 3 of 4" in await browser.run("document.querySelector('.top').textContent")
        await browser.key("End")
        await browser.key("Enter")
        await browser.until(f"{OPENED} === 'prompt 1, rollout 1'")
        assert await browser.run("document.querySelectorAll('.message').length") == 3
        await browser.screenshot(tmp_path / "live.png")
    finally:
        await server.close()
    assert [entry for entry in browser.errors if "favicon" not in entry and "404" not in entry] == []


@pytest.mark.parametrize(("generations", "labels"), [(6, "1 2 4 6"), (17, "1 2 4 8 17")])
async def test_the_pass_at_k_chart_labels_its_last_k(
    browser: Any, tmp_path: Path, rows: Any, generations: int, labels: str
) -> None:
    many = [rows(example, generation) for example in range(4) for generation in range(generations)]
    await open_run(browser, store(tmp_path / "run", many))
    chart = "[...document.querySelectorAll('figure')].find(one => one.textContent.includes('right from'))"
    texts = await browser.run(
        f"[...{chart}.querySelectorAll('text[y]')].map(one => [one.getAttribute('y'), one.textContent])"
    )
    lowest = [text for y, text in texts if text.isdigit() and float(y) > 190]
    assert " ".join(lowest) == labels


async def test_the_list_leads_to_runs_and_back_and_fits_a_narrow_window(
    browser: Any, tmp_path: Path, rows: Any
) -> None:
    reward = {"mean": 0.5, "stderr": 0.05, "low": 0.4, "high": 0.6}
    known = {"env_args": {"difficulty": "hard", "words": ["a"] * 40}, "summary": {"rewards": {"reward": reward}}}
    store(tmp_path / "evals" / "an-environment-of-a-long-name--some-model" / "abcd1234", [rows(0, 0)], **known)
    store(tmp_path / "evals" / "sums--some-model" / "abcd5678", [rows(0, 0)], **known)
    training_runs.write_run(tmp_path / "my-run", [training_runs.line(1)], [training_runs.sample(1, 0)])
    server = RunServer(tmp_path)
    await server.start()
    try:
        for width in (1400, 420):
            await browser.size(width, 800)
            await browser.open(server.url)
            assert await browser.run("document.documentElement.scrollWidth <= innerWidth")
            boxes = await browser.run(
                "[...document.querySelectorAll('.card, .runs td')].map(one => one.getBoundingClientRect().right)"
            )
            assert max(boxes) <= width
            links = await browser.run("[...document.querySelectorAll('.runs a')].map(one => one.href)")
            assert len(links) == 3
            compared = f"{server.url}compare?" + "&".join(
                "run=" + link.partition("/run/")[2].rstrip("/") for link in links if "evals" in link
            )
            for address in (*links, compared):
                await browser.open(address)
                assert await browser.run("document.documentElement.scrollWidth <= innerWidth")
                await browser.run("document.querySelector('.back').click()")
                await browser.until("document.querySelector('.runs')")
    finally:
        await server.close()
    assert browser.errors == []


@pytest.mark.parametrize(
    ("name", "width", "dark"), [("light", 1280, False), ("dark", 1280, True), ("narrow", 390, False)]
)
async def test_nothing_sticks_out_in_light_dark_and_narrow(
    browser: Any, sums_run: Path, tmp_path: Path, name: str, width: int, dark: bool
) -> None:
    path = write_evaluation_report(sums_run)
    await browser.size(width, 844, dark)
    for view in ("overview", "rollouts", "rollout=1.1", "prompts", "prompt=3"):
        await browser.open(f"file://{path}#{view}")
        await browser.run("new Promise(done => setTimeout(done, 100))")
        assert await browser.run("document.documentElement.scrollWidth <= innerWidth")
        assert await browser.run("document.documentElement.scrollHeight <= innerHeight")
        await browser.screenshot(tmp_path / f"{name}-{view.replace('=', '-')}.png")
    colour = await browser.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, colour[4:-1].split(","))) < 200) is dark
    assert browser.errors == []
