"""What a model gets on each package of `environments/`, at its easiest sensible setting.

    vf-serve --model smollm2                       # in a second terminal
    python examples/real_model/shelf.py [MODEL] [URL]

Prints a line of a Markdown table for each package as `vf-eval` ends; what a package refuses is quoted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time

MODEL, URL = [*sys.argv[1:], *["smollm2", "http://127.0.0.1:8000/v1"][len(sys.argv) - 1 :]]
JUDGE = {"judge_model": MODEL, "judge_base_url": URL}
SETTINGS: dict[str, dict[str, object]] = {
    "arithmetic-tools": {"steps": 2},
    "complete-sequence": {},
    "doublecheck": {},
    "instructions": {"level": 1},
    "judged-rewrite": JUDGE,
    "mixed-text": {},
    "python-math": {},
    "reasoning-gym-env": {"task": "chain_sum", "task_config": {"max_terms": 2, "max_digits": 2}},
    "reverse-text": {},
    "sentence-repeater": {"num_sentences": 2},
    "spell-backward": {"max_letters": 4, "num_train": 100, "num_eval": 32},
    "structured-output": {"level": 1},
    "wordle": {"any_letters": True},
    "xml-tools": {},
}

print("| package | reward | 95 % interval | truncated | seconds |\n|---|---|---|---|---|", flush=True)
for name, args in SETTINGS.items():
    started = time.perf_counter()
    command = ["vf-eval", name, "-a", json.dumps(args), "-m", MODEL, "-b", URL, "-n", "16", "-r", "2", "-t", "96"]
    done = subprocess.run([*command, "-T", "1", "--seed", "1", "--json"], capture_output=True, text=True)
    if done.returncode:
        print(f"| {name} | {done.stderr.strip().splitlines()[-1]} | | | |", flush=True)
        continue
    told = json.loads(done.stdout)
    reward = told["rewards"]["reward"]
    interval = f"{reward['low']:.2f} to {reward['high']:.2f}"
    seconds = time.perf_counter() - started
    print(f"| {name} | {reward['mean']:.3f} | {interval} | {told['truncated']} of 32 | {seconds:.0f} |", flush=True)
