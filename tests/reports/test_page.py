from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from training_runs import store

from verifiers.errors import ConfigError
from verifiers.reports import evaluation
from verifiers.reports.evaluation import write_comparison_report, write_evaluation_report
from verifiers.reports.page import EVALUATION_SCRIPTS, TRAINING_SCRIPTS, content_policy, script_text, write_page

HOSTILE = [
    "</script><script>window.canary = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.canary = 1'>",
    "]]></style><svg onload=window.canary=1>",
    "\x1b[31mred\x1b[0m \x1b]8;;http://evil.example/\x07link\x1b]8;;\x07",
    "line\u2028separator\u2029paragraph",
    "lone \ud800 surrogate, nul \x00, bidi \u202e evil",
    "__proto__",
]
VOID = {"meta", "br", "img", "input"}


class Outline(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.bodies: dict[str, str] = {}
        self._kind = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        given = dict(attrs)
        self._kind = given.get("id") or given.get("type") or tag
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.bodies[self._kind] = self.bodies.get(self._kind, "") + data


def outline(path: Path) -> Outline:
    parsed = Outline()
    parsed.feed(path.read_text(encoding="utf-8"))
    parsed.close()
    assert parsed.open == []
    return parsed


def hostile_rows(rows: Any) -> list[dict[str, Any]]:
    return [
        rows(number, 0, prompt=text, completion=[{"role": text, "content": text, "reasoning_content": text}],
             answer=text, error=text, info={text: text}, task=text, reward=0.5, **{f"f {text}": 1.0})
        for number, text in enumerate(HOSTILE)
    ]  # fmt: skip


def test_the_report_lies_beside_the_results_and_holds_everything(sums_run: Path) -> None:
    path = write_evaluation_report(sums_run)
    assert path == sums_run / "report.html"
    parsed = outline(path)
    data = json.loads(parsed.bodies["vf-data"])
    assert data["total"] == len(data["columns"]["example"]) == 320
    assert data["runs"][0]["title"] == "sums / small-model"
    blocks = [json.loads(parsed.bodies[f"vf-block-{number}"]) for number in range(4)]
    assert [len(block["rows"]) for block in blocks] == [100, 100, 100, 20]
    assert blocks[0]["rows"][9]["completion"][1]["text"] == "seven-result"
    assert parsed.tags.count("script") == 1 + 4 + 1


def test_what_models_write_stays_text_and_arrives_unchanged(tmp_path: Path, rows: Any) -> None:
    path = write_evaluation_report(store(tmp_path / "run", hostile_rows(rows), model=HOSTILE[0], env=HOSTILE[2]))
    parsed = outline(path)
    assert parsed.tags.count("script") == 3
    assert parsed.tags.count("img") == parsed.tags.count("svg") == 0
    text = path.read_text(encoding="utf-8")
    for body in (parsed.bodies["vf-data"], parsed.bodies["vf-block-0"]):
        assert "<" not in body
        assert "\u2028" not in body
    shown = [row["completion"][0]["text"] for row in json.loads(parsed.bodies["vf-block-0"])["rows"]]
    assert shown == HOSTILE
    assert "window.canary = 1</script>" not in text


def test_nothing_but_its_own_style_and_script_may_run_and_nothing_may_load(sums_run: Path) -> None:
    text = write_evaluation_report(sums_run).read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert policy
    rules = dict(rule.split(" ", 1) for rule in policy[1].replace("&#x27;", "'").split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    assert rules["img-src"] == "data:"
    assert "connect-src" not in rules
    assert "unsafe" not in policy[1]
    for kind, pattern in (("style", r"<style>(.*?)</style>"), ("script", r'<script type="module">(.*?)</script>')):
        inside = re.search(pattern, text, re.DOTALL)
        assert inside
        digest = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert rules[f"{kind}-src"] == f"'sha256-{digest}'"
    assert "connect-src 'self'" in content_policy(script_text(EVALUATION_SCRIPTS), live=True)


def test_the_script_never_parses_text_as_html() -> None:
    text = script_text(EVALUATION_SCRIPTS) + script_text(TRAINING_SCRIPTS)
    for name in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"):
        assert name not in text


def test_the_same_rows_give_the_same_bytes_in_any_order_and_process(sums_run: Path) -> None:
    first = write_evaluation_report(sums_run).read_bytes()
    results = sums_run / "results.jsonl"
    results.write_text("".join(reversed(results.read_text().splitlines(keepends=True))))
    code = (
        "import sys; from pathlib import Path; from verifiers.reports.evaluation import write_evaluation_report;"
        "write_evaluation_report(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    again = sums_run / "again.html"
    subprocess.run([sys.executable, "-c", code, str(sums_run), str(again)], check=True)
    assert again.read_bytes() == first


def test_a_huge_rollout_does_not_make_a_huge_page(tmp_path: Path, rows: Any) -> None:
    row = rows(0, 0, completion="x" * 5_000_000)
    path = write_evaluation_report(store(tmp_path / "run", [row]))
    assert path.stat().st_size < 600_000
    assert "characters left out" in path.read_text()


def test_too_many_rollouts_are_sampled_and_it_is_said(sums_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "MOST_ROLLOUTS", 80)
    data = json.loads(outline(write_evaluation_report(sums_run)).bodies["vf-data"])
    assert (len(data["columns"]["example"]), data["total"], data["runs"][0]["rollouts"]) == (80, 320, 320)
    assert len(set(data["columns"]["example"])) == 10
    assert "holds the rollouts of a sample of prompts" in script_text(EVALUATION_SCRIPTS)


def test_two_runs_share_one_page(sums_run: Path, tmp_path: Path, rows: Any) -> None:
    other = store(tmp_path / "other" / "b", [rows(e, 0, reward=1.0) for e in range(30, 50)], model="other")
    data = json.loads(outline(write_comparison_report(sums_run, other, tmp_path / "two.html")).bodies["vf-data"])
    assert [run["title"] for run in data["runs"]] == ["sums / small-model", "sums / other"]
    assert data["difference"]["shared"] == 10
    assert data["columns"]["run"].count(1) == 20
    assert (data["difference"]["askedOtherwise"], data["difference"]["settings"]) == ([], [])


def test_a_run_without_metadata_and_with_an_incomplete_line_is_shown(tmp_path: Path, rows: Any) -> None:
    (tmp_path / "results.jsonl").write_text(json.dumps(rows(0, 0)) + "\n" + '{"example_id": 1, "gen')
    data = json.loads(outline(write_evaluation_report(tmp_path)).bodies["vf-data"])
    assert data["total"] == 1


def test_a_directory_without_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"results\.jsonl"):
        write_evaluation_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_every_script_file_is_joined() -> None:
    folder = Path(evaluation.__file__).parent / "assets"
    assert {*EVALUATION_SCRIPTS, *TRAINING_SCRIPTS} == {path.name for path in folder.glob("*.js")}


@pytest.mark.slow
def test_a_report_of_a_long_run_never_holds_its_transcripts(
    tmp_path: Path, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 rollouts, 40 MB, of which the page shows 100."""
    monkeypatch.setattr(evaluation, "MOST_ROLLOUTS", 100)
    said = [{"role": "assistant", "content": "x" * 10_000}]
    run = store(tmp_path / "run", [rows(n // 4, n % 4, completion=said) for n in range(4000)])
    tracemalloc.start()
    try:
        page = write_evaluation_report(run)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    data = json.loads(outline(page).bodies["vf-data"])
    assert (data["total"], data["runs"][0]["rollouts"], len(data["columns"]["example"])) == (4000, 4000, 100)
    assert peak < 12_000_000


def test_a_page_written_into_a_pipe_leaves_it_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        write_page(pipe, "<p>a page</p>")
        assert read.result(10) == "<p>a page</p>"
    assert pipe.is_fifo()
