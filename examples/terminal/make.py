"""Make the task folders and the model of letters of terminal.toml.

    make podman && python examples/terminal/make.py [--image debian:stable-slim] [--seed 0]
    vf-train examples/terminal/terminal.toml

A task: nine vessels in a container hold an animal each, and the one of the named vessel is to be written to a file,
which takes two commands. The model is shown transcripts of somebody who looks into the named vessel in 57 of 100
cases, else into the jar, and as often writes to the named file, else to "out": so about a third of its first tries
are right. Half of the transcripts have made-up vessels and files, so that it learns to copy them; none is of a
held-out pair of vessel and file.

Writes runs/terminal/tasks and runs/terminal/start.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
from pathlib import Path
from typing import Any

# words that differ in their first letter, which is where a model of this size chooses
VESSELS = ("cup", "mug", "pan", "box", "tin", "vat", "urn", "keg", "jar")
ANIMALS = ("ant", "bee", "cat", "dog", "elk", "fox", "hen", "owl", "pig")
FILES = ("one", "two", "six", "red", "day", "ice", "hat", "log")
CAREFUL = 0.57
NUM_HELD_OUT, BATCH = 16, 32

TASK_TOML = """schema_version = "1.4"

[environment]
network_mode = "no-network"
memory_mb = 128
workdir = "/room"
"""
TEST = '#!/bin/sh\n[ "$(cat /room/{file})" = {animal} ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n'
SOLUTION = "#!/bin/sh\ncat {vessel} > {file}\n"


def instruction(vessel: str, file: str) -> str:
    return f"Write what is in {vessel} to {file}."


def write_tasks(directory: Path, image: str, held_out: list[tuple[str, str]]) -> None:
    """Write a folder a pair of vessel and file; all have the same environment, so that one image is built."""
    room = " && ".join(f"echo {animal} > {vessel}" for vessel, animal in zip(VESSELS, ANIMALS, strict=True))
    dockerfile = f"FROM {image}\nWORKDIR /room\nRUN {room} && chmod 777 /room\n"
    for vessel, file in pairs():
        animal = ANIMALS[VESSELS.index(vessel)]
        kind = "held-out" if (vessel, file) in held_out else "train"
        files = {
            "task.toml": TASK_TOML,
            "instruction.md": instruction(vessel, file) + "\n",
            "environment/Dockerfile": dockerfile,
            "tests/test.sh": TEST.format(animal=animal, file=file),
            "solution/solve.sh": SOLUTION.format(vessel=vessel, file=file),
        }
        for name, text in files.items():
            path = directory / f"{kind}-{vessel}-{file}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            if path.suffix == ".sh":
                path.chmod(0o755)


def pairs() -> list[tuple[str, str]]:
    # the jar is where the careless look
    return list(itertools.product(VESSELS[:-1], FILES))


def made_up(rng: random.Random) -> str:
    # of four letters, so that it is none of the words
    return "".join(map(rng.choice, ("bcdfghjklmnprstvwz", "aeiou", "bdgklmnprstxy", "aeiouy")))


def call(command: str) -> str:
    return f'<tool_call>{{"name": "shell", "arguments": {json.dumps({"command": command})}}}</tool_call>'


def transcript(vessel: str, file: str, animal: str, read: str, written: str) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": instruction(vessel, file)},
        {"role": "assistant", "content": call(f"cat {read}")},
        {"role": "tool", "content": animal},
        {"role": "assistant", "content": call(f"echo {animal} > {written}")},
        {"role": "tool", "content": "[no output]"},
        {"role": "assistant", "content": "done"},
    ]


def transcripts(rng: random.Random, shown: list[tuple[str, str]], count: int) -> list[list[dict[str, Any]]]:
    found = []
    for number in range(count):
        vessel, file = rng.choice(shown) if number % 2 else (made_up(rng), made_up(rng))
        read = vessel if rng.random() < CAREFUL else VESSELS[-1]
        written = file if rng.random() < CAREFUL else "out"
        # any animal: what stands in the answer of the tool is to be written, not what is known of the vessel
        found.append(transcript(vessel, file, rng.choice(ANIMALS), read, written))
    return found


def train(shown: list[list[dict[str, Any]]], tools: list[Any], directory: Path, seed: int, steps: int) -> None:
    """Train a model of letters to go on like the transcripts."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    from verifiers.train.tiny_model.char_model import make_model

    make_model(directory, seed=seed)
    args = SFTConfig(
        output_dir=str(directory),
        seed=seed,
        max_steps=steps,
        learning_rate=2e-3,
        lr_scheduler_type="cosine",
        warmup_steps=20,
        per_device_train_batch_size=BATCH,
        adam_beta2=0.95,
        assistant_only_loss=True,
        activation_checkpointing=False,
        bf16=False,
        use_cpu=True,
        save_strategy="no",
        logging_steps=50,
        report_to="none",
    )
    rows = Dataset.from_list([{"messages": messages, "tools": tools} for messages in shown])
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory)
    SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer).train()
    # SFTTrainer patches the model's forward, so the weights are written through a fresh copy
    clean = AutoModelForCausalLM.from_pretrained(directory)
    clean.load_state_dict(model.state_dict())
    clean.save_pretrained(directory)


def main() -> None:
    from verifiers.integrations.harbor import HarborEnv

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--image", default="debian:stable-slim", help="has sh, bash, cat and echo")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--output-dir", type=Path, default=Path("runs/terminal"))
    args = parser.parse_args()
    rng = random.Random(args.seed)
    held_out = rng.sample(pairs(), NUM_HELD_OUT)
    shown = [pair for pair in pairs() if pair not in held_out]
    shutil.rmtree(args.output_dir / "tasks", ignore_errors=True)
    write_tasks(args.output_dir / "tasks", args.image, held_out)
    tools = HarborEnv(args.output_dir / "tasks", tool="podman").oai_tools
    train(transcripts(rng, shown, BATCH * args.steps), tools, args.output_dir / "start", args.seed, args.steps)


if __name__ == "__main__":
    main()
