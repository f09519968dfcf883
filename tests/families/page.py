"""The table of model families as JSON, and the page that is written from it.

    python tests/families/page.py

measures every family and writes docs/reference/models.json and models.md. The column of vLLM needs `make vllm`;
without it the cells stay as they are.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "reference" / "models.json"
PAGE = TABLE.with_suffix(".md")

_HEAD = """# Models

Families that are tried at every change, each as a checkpoint of 0.2 to 1.2 million random parameters with the
family's own layers, special tokens and chat format (`make test-families`; as JSON: [models.json](models.json)).
What holds for such a model holds for a large one of its type as far as names, layouts, caches and formats go, not
for speed.

{table}

- **embedded**: the [embedded server](embedded-server.md) loads it and samples the same tokens alone and in a batch;
  their log-probs are those of transformers' own forward pass within 1e-4, also behind turns that were kept. Of
  multimodal checkpoints the text side is served, without the tower, where no image comes. "refused": before
  anything is loaded, by the model type and the kind of its layers.
- **pushes**: weights arrive through a directory, also where a checkpoint's names are not those in memory (fused
  experts, prefixes), and agree as above.
- **LoRA**: an adapter on all linear layers is merged for a push; PEFT takes none on Mamba's `out_proj`.
- **trains**: two steps of dialogues with three turns, the server in the trainer's process: the trainer's log-probs
  are the sampler's within 1e-4 after each push; the embedded server and transformers load the final model.
- **resume**: a resumed run has the weights that were saved, to the last bit.
- **tools**: calls are read in the format that the family's models write, and its chat template prints them again.
- **reasoning**: thoughts are told apart from the answer (`--reasoning-parser think`; for gpt-oss always).
- **images**: of multimodal models: prompts with images get the log-probs of transformers' own pass within 1e-4, in
  any batch and after a push, and dialogues in which each turn shows one are trained ([guide](../guides/images.md)).
  "no": not tried.
- **vLLM**: vLLM 0.32's CPU build, with the plugin of `vf-vllm`, starts from the checkpoint, images left out, and the
  log-probs of what it samples are transformers' own within 1e-3: at first, after a push of other weights, and after
  one of the first again (`make test-vllm`). "bfloat16": its kernels take nothing else, and the mean agrees within
  0.05.
  "no": the first weights agree, a push does not. gpt-oss's loader passes by vLLM's reload, so experts and sinks stay
  as they were; Gemma 3n gives NaN. The check of log-probs ends such a run after its first push.
  "refused" by vLLM's CPU build: DeepSeek V3.2's sparse attention has no kernel, nor have Nemotron-H's experts, and
  MiniMax's are routed by a function that it does not have. DeepSeek V3 needs `--attention-backend CPU_MLA` on a
  processor with AMX, whose own kernels take no push.

Layers with a state (Qwen 3.5, Qwen3-Next, Granite 4, LFM2, Nemotron-H) keep one a sequence, whatever its length. A
state cannot be cut back, so a prompt goes on from a kept turn only where it begins with all of it, as turns by token
ids do; and `--cuda-graphs` is refused for such models.
"""

_TITLES = {"lora": "LoRA", "vllm": "vLLM"}


def render(table: dict[str, dict[str, str]]) -> str:
    """Return the page of a table: a row by each family's name, a cell by each check's."""
    columns = [name for name in next(iter(table.values())) if name != "model_type"]
    lines = [
        "| family | `model_type` | " + " | ".join(_TITLES.get(name, name) for name in columns) + " |",
        "|---" * (len(columns) + 2) + "|",
    ]
    for family, row in table.items():
        lines.append(f"| {family} | `{row['model_type']}` | " + " | ".join(row[name] for name in columns) + " |")
    return _HEAD.format(table="\n".join(lines))


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
