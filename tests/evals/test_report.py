from __future__ import annotations

import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from verifiers.evals.line_chart import round_ticks
from verifiers.evals.report import Curve, Sample, render_report, write_report

VOID = {"meta", "br", "link", "img"}  # HTML elements without an end; those of SVG close themselves
CURVES = [
    Curve("train/reward", [(step, 1 - 0.9**step) for step in range(60)], "reward"),
    Curve("tokens per second", [(0, 900.0), (10, 1200.0), (20, math.nan), (30, 1100.0), (40, 1150.0)], "tokens/s"),
    Curve("eval/reward", [(0, 0.1), (20, 0.5), (40, 0.8)], "reward"),
]
HOSTILE = '<script>alert("1")</script><img src="https://example.org/x.png" onerror="alert(2)">&amp;'


class Outline(HTMLParser):
    """Checks that elements nest, and keeps what a browser would load or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def outline(text: str) -> Outline:
    parsed = Outline()
    parsed.feed(text)
    parsed.close()
    assert parsed.open == []
    return parsed


def test_a_report_is_one_well_formed_page_with_all_it_was_given(tmp_path: Path) -> None:
    path = write_report(
        tmp_path / "new" / "report.html",
        title="reverse text",
        summary_rows=[("mean reward", "0.82 ± 0.03"), ("prompts", "40")],
        curves=CURVES,
        samples=[Sample("example 3", "reverse abc", "cba", 1.0, "cba"), Sample("example 4", "x", "y")],
    )
    parsed = outline(path.read_text(encoding="utf-8"))
    text = " ".join(parsed.text)
    for part in ("reverse text", "0.82 ± 0.03", "example 3", "cba", "reward 1", "not scored", "eval/reward"):
        assert part in text
    assert parsed.tags.count("svg") == 2
    assert parsed.tags.count("details") == 2


def test_a_report_loads_nothing_from_elsewhere() -> None:
    samples = [Sample("s", HOSTILE, "see https://example.org", 0.0, "http://example.org")]
    text = render_report("t", [("link", "https://example.org")], CURVES, samples)
    parsed = outline(text)
    loading = {"src", "href", "srcset", "action", "data", "xlink:href", "poster"}
    assert not [name for name, _ in parsed.attributes if name in loading]
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(parsed.tags)
    assert not [value for _, value in parsed.attributes if value and re.search("https?://", value)]
    (style,) = re.findall("<style>(.*?)</style>", text, re.DOTALL)
    assert not re.search(r"url\(|@import|https?:", style)


def test_whatever_a_model_wrote_is_escaped_everywhere() -> None:
    curves = [Curve(HOSTILE[:40], [(0, 1), (1, 2)], HOSTILE[:40])]
    samples = [Sample(HOSTILE, HOSTILE, HOSTILE, 0.5, HOSTILE)]
    text = render_report(HOSTILE, [(HOSTILE, HOSTILE)], curves, samples, HOSTILE)
    assert "<script" not in text
    assert "<img" not in text
    assert "&lt;script&gt;" in text
    assert "&amp;amp;" in text
    assert "".join(outline(text).text).count(HOSTILE) >= 8


def test_a_report_without_anything_is_still_a_page() -> None:
    parsed = outline(render_report("empty", [], [Curve("nothing yet", [])], []))
    assert "svg" not in parsed.tags


@pytest.mark.parametrize(
    "points",
    [[(0, 1)], [(0, 0.7), (1, 0.7)], [(5, math.nan)], [(0, -1e9), (1, 1e9)], [(0, 1e-9), (1, 2e-9)], [(0, math.inf)]],
)
def test_odd_curves_still_draw_numbers(points: list[tuple[float, float]]) -> None:
    text = render_report("t", [], [Curve("c", points)], [])
    assert "svg" in outline(text).tags
    assert not re.search(r'"[^"]*\b(nan|inf)\b[^"]*"', text)


def test_only_curves_with_a_unit_in_common_share_a_chart() -> None:
    bare = [Curve("kl", [(0, 0.001)]), Curve("share", [(0, 0.9)])]
    assert outline(render_report("t", [], [*CURVES, *bare], [])).tags.count("svg") == 4


def test_a_gap_in_a_curve_is_left_open() -> None:
    text = render_report("t", [], [CURVES[1]], [])
    assert [len(line.split()) for line in re.findall('points="([^"]*)"', text)] == [2, 2]


def test_long_curves_keep_every_point_in_the_line_and_few_to_point_at() -> None:
    text = render_report("t", [], [Curve("c", [(x, math.sin(x)) for x in range(5000)])], [])
    (line,) = re.findall('points="([^"]*)"', text)
    assert len(line.split()) == 5000
    assert text.count("<title>c:") <= 240


def test_ticks_are_round_and_span_the_data() -> None:
    assert round_ticks([0.03, 0.97], 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert round_ticks([0, 60], 6) == [0, 10, 20, 30, 40, 50, 60]
    assert round_ticks([900, 1200], 5) == [900, 1000, 1100, 1200]
    assert round_ticks([], 5) == [0, 0.2, 0.4, 0.6, 0.8, 1]


def test_text_that_is_no_unicode_does_not_stop_a_report(tmp_path: Path) -> None:
    path = write_report(tmp_path / "r.html", title="t", samples=[Sample("s", "p", "\ud800 broken", 0.0)])
    assert "? broken" in path.read_text(encoding="utf-8")


def test_a_report_that_fails_leaves_the_old_one_and_no_rubbish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_report(tmp_path / "r.html", title="old")

    def full_disk(source: str, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.replace", full_disk)
    with pytest.raises(OSError, match="no space"):
        write_report(path, title="new")
    assert "<h1>old</h1>" in path.read_text(encoding="utf-8")
    assert [entry.name for entry in tmp_path.iterdir()] == ["r.html"]
