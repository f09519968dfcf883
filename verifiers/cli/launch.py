"""`vf-launch run.toml --slurm|--k8s`: render a run file as a Slurm script or as Kubernetes manifests."""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import string
import subprocess
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifiers.cli.main import DONE, Command, CommandFailedError, CommandParser
from verifiers.errors import ConfigError

if TYPE_CHECKING:
    from verifiers.train.run_file import RunFile

_TEMPLATES = Path(__file__).with_name("templates") / "cluster"
_SERVERS = {"vllm": "vf-vllm", "embedded": "vf-serve"}
# of each of its pods, beside the workers' own
_MEMORY_OF_RAY = 2 << 30
_SUBMIT = {"slurm": ("sbatch", ()), "k8s": ("kubectl", ("apply", "-f", "-"))}

_JOIN_RAY = """\
              [ "$JOB_COMPLETION_INDEX" != 0 ] ||
              until ray start --address {name}-head-svc:6379 --num-cpus=0; do sleep 5; done;
"""


class _Template(string.Template):
    # no shell and no YAML uses it
    delimiter = "%%"


def parser() -> CommandParser:
    parser = CommandParser(
        "vf-launch",
        "Start a run on a cluster: its table [cluster] says how many nodes train and how many sample.",
        examples=("vf-launch run.toml --slurm --dry-run > run.sbatch", "vf-launch run.toml --k8s"),
        epilog="Without --dry-run, what is rendered goes to sbatch or to `kubectl apply`, which must be installed.",
    )
    add = parser.group("run")
    add("run_file", metavar="FILE", help="TOML file that describes the run, as of vf-train")
    add("--slurm", action="store_true", help="as a Slurm batch script")
    add("--k8s", action="store_true", help="as Kubernetes manifests")
    add("--dry-run", action="store_true", help="print what would be submitted, and submit nothing")
    return parser


def launch(args: argparse.Namespace) -> int:
    if args.slurm == args.k8s:
        raise ConfigError("give one of --slurm and --k8s.")
    kind = "slurm" if args.slurm else "k8s"
    text = rendered(args.run_file, kind)
    if args.dry_run:
        print(text, end="")
        return DONE
    program, arguments = _SUBMIT[kind]
    if shutil.which(program) is None:
        raise ConfigError(f"{program} is not installed here; --dry-run prints what it would be given.")
    done = subprocess.run([program, *arguments], input=text, text=True, check=False)
    if done.returncode:
        raise CommandFailedError(f"{program} ended with exit code {done.returncode}.")
    return DONE


def rendered(run_file: str, kind: str) -> str:
    """Return what a run file becomes: "slurm" a script, "k8s" manifests.

    The nodes find the file under the same path from the working directory.
    """
    from verifiers.train.run_file import load_run_file

    run = load_run_file(run_file)
    cluster = run.cluster
    if run.server.launch is None and cluster.server_nodes:
        raise ConfigError(
            f"{run_file}: [cluster] server_nodes is {cluster.server_nodes}, and [server] does not say what they run; "
            "give [server] launch, or server_nodes = 0 where [server] url names a server that runs."
        )
    if run.server.launch is not None and run.server.launch not in _SERVERS:
        raise ConfigError(f"{run_file}: [server] launch is {run.server.launch!r}; give one of {sorted(_SERVERS)}.")
    if run.server.launch is not None and not cluster.server_nodes:
        raise ConfigError(f"{run_file}: [server] launch needs nodes here; give [cluster] server_nodes = 1 or more.")
    if cluster.accelerate_config is None and cluster.trainer_nodes * max(1, cluster.gpus_per_node) > 1:
        # without one accelerate may start processes that are not connected
        raise ConfigError(
            f"{run_file}: several processes train, and [cluster] accelerate_config does not say how; give one such "
            "as examples/accelerate/fsdp.yaml."
        )
    _check_ray(run_file, run)
    values: dict[str, Any] = {
        "name": re.sub(r"[^a-z0-9]+", "-", Path(run_file).stem.lower()).strip("-"),
        "run_file": shlex.quote(run_file),
        "nodes": cluster.trainer_nodes + cluster.server_nodes + cluster.ray_nodes,
        "trainer_nodes": cluster.trainer_nodes,
        "server_nodes": cluster.server_nodes,
        "server_port": cluster.server_port,
        "ray_nodes": cluster.ray_nodes,
        "accelerate": shlex.join(_accelerate(run)),
    }
    return (_slurm if kind == "slurm" else _kubernetes)(run, Path(run_file), values)


def _accelerate(run: RunFile) -> list[str]:
    cluster = run.cluster
    processes = cluster.trainer_nodes * max(1, cluster.gpus_per_node)
    config = [] if cluster.accelerate_config is None else ["--config_file", cluster.accelerate_config]
    numbers = ["--num_machines", str(cluster.trainer_nodes), "--num_processes", str(processes)]
    return [*config, *numbers, "--main_process_port", str(cluster.main_process_port)]


def _server(run: RunFile, run_file: str) -> list[str]:
    """Return the command of a rollout server, without its host; refuse weights that cannot reach another node."""
    if run.server.launch is None:
        return []
    by_files = run.server.launch == "embedded" or run.trainer.get("weight_sync") in ("directory", "lora")
    if by_files and "weight_sync_dir" not in run.trainer:
        raise ConfigError(
            f"{run_file}: these servers read new weights from files; give [trainer] weight_sync_dir on a file system "
            'that all nodes mount, or [server] launch = "vllm" and weight_sync = "nccl".'
        )
    command = [_SERVERS[run.server.launch], "--model", run.model.path, "--port", str(run.cluster.server_port)]
    if not by_files and "--weight-transfer-config" not in run.server.args:
        command += ["--weight-transfer-config", '{"backend": "nccl"}']
    return [*command, *run.server.args]


def _check_ray(run_file: str, run: RunFile) -> None:
    workers, nodes = run.workers, run.cluster.ray_nodes
    if workers.engine != "ray":
        if nodes:
            raise ConfigError(
                f"{run_file}: [cluster] ray_nodes is {nodes}, and [workers] engine is {workers.engine!r}; give "
                'engine = "ray", or ray_nodes = 0.'
            )
        return
    if not nodes:
        raise ConfigError(
            f'{run_file}: [workers] engine = "ray" needs nodes here; give [cluster] ray_nodes = 1 or more.'
        )
    if workers.address != "auto":
        raise ConfigError(f"{run_file}: Ray is started with the run; leave out [workers] address.")
    if workers.count is None or not workers.start_timeout:
        raise ConfigError(
            f"{run_file}: the nodes of Ray join while the run starts; give [workers] count, and start_timeout, such "
            "as 600.0 seconds."
        )


def _ray_node(run: RunFile) -> tuple[dict[str, int], str]:
    """Return what a node of Ray needs for its share of the workers, as Kubernetes names it, and the rest as JSON."""
    workers = run.workers
    share = math.ceil((workers.count or 1) / max(1, run.cluster.ray_nodes))
    needs = {name: share * amount for name, amount in {"CPU": workers.cpus, **workers.resources}.items()}
    known = {"CPU": "cpu", "GPU": "nvidia.com/gpu", "memory": "memory"}
    own = {name: amount for name, amount in needs.items() if name not in known}
    limits = {known[name]: math.ceil(amount) for name, amount in needs.items() if name in known}
    if "memory" in limits:
        limits["memory"] += _MEMORY_OF_RAY
    return limits, json.dumps(own) if own else ""


def _template(name: str, values: dict[str, Any]) -> str:
    return _Template((_TEMPLATES / f"{name}.tmpl").read_text(encoding="utf-8")).substitute(values)


# -- Slurm -----------------------------------------------------------------------------------------------------


def _slurm(run: RunFile, path: Path, values: dict[str, Any]) -> str:
    cluster = run.cluster
    lines = [f"#SBATCH --gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []
    lines += [f"#SBATCH {option}" for option in cluster.sbatch]
    server = shlex.join(_server(run, str(path)))
    values |= {"time": cluster.time, "resources": "".join(f"\n{line}" for line in lines), "server": server}
    values["servers"] = "\n" + _template("slurm_servers.sh", values) if server else ""
    values |= {"ray_port": cluster.ray_port, "first_ray_node": cluster.trainer_nodes + cluster.server_nodes}
    resources = _ray_node(run)[1]
    values["ray_resources"] = f" --resources={shlex.quote(resources)}" if resources else ""
    values["ray"] = "\n" + _template("slurm_ray.sh", values) if cluster.ray_nodes else ""
    values["server_urls"] = ' "${server_urls[@]}"' if server else ""
    return _template("slurm.sh", values)


# -- Kubernetes ------------------------------------------------------------------------------------------------


def _kubernetes(run: RunFile, path: Path, values: dict[str, Any]) -> str:
    cluster = run.cluster
    if cluster.image is None or cluster.volume_claim is None:
        raise ConfigError(
            f"{path}: --k8s needs [cluster] image, with verifiers and the environment installed, and volume_claim, "
            "which all pods mount as /work."
        )
    name, port = values["name"], cluster.server_port
    if not re.fullmatch(r"[a-z][-a-z0-9]{0,40}", name):
        raise ConfigError(
            f"{path}: the name of the file gives {name!r} as the name of the run, and Kubernetes takes at most 41 "
            "small letters, digits and dashes, a letter first; rename the file."
        )
    server = _server(run, str(path))
    hosts = [f"{name}-server-{number}.{name}" for number in range(cluster.server_nodes)]
    urls = [part for host in hosts for part in ("--server-url", f"http://{host}:{port}/v1")]
    volumes = [
        {"name": "work", "persistentVolumeClaim": {"claimName": cluster.volume_claim}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    mounts = [{"name": "work", "mountPath": "/work"}, {"name": "shm", "mountPath": "/dev/shm"}]
    values |= {
        "image": json.dumps(cluster.image),
        "server_image": json.dumps(cluster.server_image or cluster.image),
        "limits": f"nvidia.com/gpu: {cluster.gpus_per_node}" if cluster.gpus_per_node else "",
        "server_args": _items([*server, "--host", "0.0.0.0"]),
        # JSON is YAML at any depth
        "mounts": json.dumps(mounts),
        "volumes": json.dumps(volumes),
        "trainer_mounts": json.dumps([*mounts, {"name": "run", "mountPath": "/run/verifiers"}]),
        "trainer_volumes": json.dumps([*volumes, {"name": "run", "configMap": {"name": name}}]),
    }
    limits, resources = _ray_node(run)
    # ray start gets the resources through a shell
    ray_params = f"resources: {json.dumps(shlex.quote(resources))}" if resources else ""
    values |= {"ray_limits": json.dumps(limits), "ray_params": ray_params}
    trainer = ["-m", "verifiers.cli.train", "/run/verifiers/run.toml", *urls]
    values |= {
        "run_text": textwrap.indent(path.read_text(encoding="utf-8").rstrip("\n"), " " * 4),
        "servers": _template("kubernetes_servers.yaml", values) if server else "",
        "ray": _template("kubernetes_ray.yaml", values) if cluster.ray_nodes else "",
        "join_ray": _JOIN_RAY.format(name=name) if cluster.ray_nodes else "",
        "trainer_args": _items([*_accelerate(run), *trainer]),
    }
    return _template("kubernetes.yaml", values)


def _items(words: Sequence[str]) -> str:
    """Return a command's words as a YAML list, a word a line."""
    return "\n".join(f"{' ' * 12}- {json.dumps(word)}" for word in words)


main = Command(parser, launch)
