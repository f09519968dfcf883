"""The table of model families as JSON, and the same table in the page about them.

    python tests/families/page.py

measures every family and writes docs/reference/models.json and the table in models.md. The column of vLLM needs
`make vllm`; without it the cells stay as they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reference" / "models.json"
PAGE = TABLE.with_suffix(".md")

_TITLES = {"lora": "LoRA", "vllm": "vLLM"}


def render(table: dict[str, dict[str, str]]) -> str:
    """Return the page with this table in it: a row by each family's name, a cell by each check's."""
    columns = [name for name in next(iter(table.values())) if name != "model_type"]
    lines = [
        "| family | `model_type` | " + " | ".join(_TITLES.get(name, name) for name in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for family, row in table.items():
        lines.append(f"| {family} | `{row['model_type']}` | " + " | ".join(row[name] for name in columns) + " |")
    before, _, rest = PAGE.read_text().partition("| family |")
    return before + "\n".join(lines) + "\n\n" + rest.partition("\n\n")[2]


def main() -> None:
    sys.path += [str(ROOT / "tests" / "families"), str(ROOT / "tests" / "end_to_end")]
    from checks import measure
    from families import FAMILIES
    from on_vllm import PYTHON, cell_of, sample_all

    table = {}
    known = json.loads(TABLE.read_text())
    with tempfile.TemporaryDirectory() as scratch:
        sampled = sample_all(Path(scratch) / "vllm") if Path(PYTHON).is_file() else None
        for family in FAMILIES:
            table[family.name], reasons = measure(family, Path(scratch) / family.name)
            for reason in reasons:
                print(*getattr(reason, "__notes__", ()), reason, sep=": ", flush=True)
            cell = (
                (known.get(family.name, {}).get("vllm", "?"), "not measured")
                if sampled is None
                else cell_of(family, sampled)
            )
            table[family.name]["vllm"] = cell[0]
            print(family.name, "vLLM", *cell, sep=": ", flush=True)
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    PAGE.write_text(render(table))


if __name__ == "__main__":
    main()
