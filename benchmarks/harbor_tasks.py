"""Rewards of the test suite's twelve Harbor tasks by their oracle, here and by Harbor itself.

    make podman
    python3.12 -m venv .venv-bench-harbor && .venv-bench-harbor/bin/pip install harbor==0.26.0 podman-compose
    python benchmarks/harbor_tasks.py [--tasks tests/integrations/harbor_tasks]

Prints a line a task and ends with one line of JSON: tasks, equal, different (the names). Says "not run" where podman
or harbor cannot be had. VERIFIERS_HARBOR names another directory of harbor's programs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACE = Path(os.environ.get("VERIFIERS_PODMAN") or Path.home() / ".cache/verifiers-podman")
HARBOR = Path(os.environ.get("VERIFIERS_HARBOR") or ROOT / ".venv-bench-harbor/bin")

Rewards = dict[str, float | None]


def ours(tasks: Path, directory: str) -> Rewards:
    command = [sys.executable, "-m", "verifiers.cli.evaluate", f"harbor:{tasks}", "--agent", "oracle"]
    subprocess.run(
        [*command, "-n", "-1", "-r", "1", "--output-dir", directory], check=True, stdout=subprocess.DEVNULL
    )
    [stored] = Path(directory).glob("*/*/results.jsonl")
    rows = map(json.loads, stored.read_text().splitlines())
    return {row["task"]: row["reward"] for row in rows}


def harbors(tasks: Path, directory: str) -> Rewards:
    environ = {**os.environ, "PATH": f"{HARBOR}{os.pathsep}{os.environ['PATH']}"}
    # nothing is asked of a model, whose prices would be fetched
    environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    copied = Path(directory, "tasks")
    shutil.copytree(tasks, copied)
    for file in copied.glob("*/task.toml"):
        # which its podman refuses
        file.write_text(file.read_text().replace('network_mode = "no-network"', 'network_mode = "public"'))
    command = [str(HARBOR / "harbor"), "run", "--path", str(copied), "--agent", "oracle", "--env", "podman"]
    command += ["--jobs-dir", f"{directory}/jobs", "--n-concurrent", "2", "--quiet", "--yes"]
    subprocess.run(command, env=environ, check=True, stdout=subprocess.DEVNULL)
    rewards: Rewards = {}
    for file in Path(directory).glob("jobs/*/*/result.json"):
        result = json.loads(file.read_text())
        found = (result.get("verifier_result") or {}).get("rewards")
        if found is not None and not isinstance(found, dict):
            found = {"reward": found}
        name = Path(result["task_id"]["path"]).name
        rewards[name] = None if not found else found.get("reward", statistics.fmean(found.values()))
    return rewards


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", type=Path, default=ROOT / "tests/integrations/harbor_tasks")
    args = parser.parse_args()
    if not (PLACE / "registries.conf").exists() or (PLACE / "not-available").exists():
        print("harbor_tasks: not run: podman is not prepared (make podman)")
        return 0
    if not (HARBOR / "harbor").exists():
        print(f"harbor_tasks: not run: harbor is not installed in {HARBOR}")
        return 0
    os.environ["CONTAINERS_CONF"] = str(PLACE / "containers.conf")
    os.environ["CONTAINERS_REGISTRIES_CONF"] = str(PLACE / "registries.conf")
    with tempfile.TemporaryDirectory() as ours_at, tempfile.TemporaryDirectory() as harbors_at:
        here, there = ours(args.tasks, ours_at), harbors(args.tasks, harbors_at)
    for name in sorted({*here, *there}):
        print(f"{name:<20} here {here.get(name)!s:<6} harbor {there.get(name)!s:<6}")
    different = sorted(name for name in {*here, *there} if here.get(name) != there.get(name))
    print(json.dumps({"tasks": len(here), "equal": len(here) - len(different), "different": different}))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
