"""Make the model that both sides begin with: the demo's, after its supervised warm start."""

from __future__ import annotations

import sys
from pathlib import Path

from common import arguments

DEMO = Path(__file__).parents[2] / "examples" / "demo"


def main() -> None:
    sys.path.insert(0, str(DEMO))
    import torch
    from tiny import environment_and_pairs

    from verifiers.train.tiny_model.char_model import make_model
    from verifiers.train.tiny_model.warm_start import warm_start

    asked = arguments()
    out = Path(asked["output_dir"])
    torch.set_num_threads(asked["threads"])
    _, shown, eval_pairs = environment_and_pairs()
    make_model(out / "model", seed=asked["seed"])
    warm_start(out / "model", out / "start", shown=shown, eval_pairs=eval_pairs, seed=asked["seed"])


if __name__ == "__main__":
    main()
