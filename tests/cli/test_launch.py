"""vf-launch: what a run file becomes on Slurm and on Kubernetes, checked by their own tools where these are there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from verifiers.cli.launch import main, rendered
from verifiers.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLE = "examples/cluster/reverse_text.toml"
BASE = '[environment]\nid = "e"\n[model]\npath = "m"\n'


def run_file(tmp_path: Path, text: str) -> str:
    (tmp_path / "my run.toml").write_text(BASE + text)
    return str(tmp_path / "my run.toml")


def manifests(text: str) -> dict[str, Any]:
    return {found["kind"]: found for found in yaml.safe_load_all(text)}


@pytest.mark.parametrize(("kind", "suffix"), [("slurm", ".sbatch"), ("k8s", ".yaml")])
def test_the_examples_are_what_the_command_prints(
    kind: str, suffix: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    assert main([EXAMPLE, f"--{kind}", "--dry-run"]) == 0
    assert capsys.readouterr().out == (ROOT / EXAMPLE).with_suffix(suffix).read_text()


SCRIPTS = {
    "alone": "",
    "servers": '[server]\nlaunch = "vllm"\nargs = ["--a", "it\'s $HOME"]\n[cluster]\nserver_nodes = 2\n',
    "options": '[cluster]\ngpus_per_node = 4\nsbatch = ["--partition=p", "--account=a"]\ntrainer_nodes = 3\n'
    'accelerate_config = "my ddp.yaml"\n',
    "ray": '[server]\nlaunch = "vllm"\n[workers]\nengine = "ray"\ncount = 5\nstart_timeout = 60.0\n'
    "cpus = 1.5\nresources = { docker = 0.5, GPU = 0.5, memory = 1073741824 }\n"
    "[cluster]\nserver_nodes = 1\nray_nodes = 2\n",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_are_bash(name: str, tmp_path: Path) -> None:
    text = rendered(run_file(tmp_path, SCRIPTS[name]), "slurm")
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert ("vf-vllm" in text) == (name in ("servers", "ray"))
    assert ("ray start" in text) == (name == "ray")
    assert "%%" not in text
    if name == "servers":
        assert """--a 'it'"'"'s $HOME'""" in text
    if name == "options":
        assert "#SBATCH --gpus-per-node=4\n#SBATCH --partition=p\n#SBATCH --account=a\n#" in text
        assert "--config_file 'my ddp.yaml' --num_machines 3 --num_processes 12" in text
    if name == "ray":
        assert "#SBATCH --nodes=4\n" in text
        assert 'servers=("${hosts[@]:1:1}")' in text
        assert 'ray_nodes=("${hosts[@]:2:2}")' in text
        assert """ray start --address "$RAY_ADDRESS" --resources='{"docker": 1.5}' --block &""" in text


@pytest.mark.parametrize("name", SCRIPTS)
def test_shellcheck_has_nothing_to_say(name: str, tmp_path: Path) -> None:
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed")
    text = rendered(run_file(tmp_path, SCRIPTS[name]), "slurm")
    done = subprocess.run([program, "-"], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_manifests_fit_kubernetes_schemas(tmp_path: Path) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    more = "image = 'i'\nvolume_claim = 'v'\n"
    for text in (SCRIPTS["servers"] + more, SCRIPTS["options"] + more):
        for found in yaml.safe_load_all(rendered(run_file(tmp_path, text), "k8s")):
            kubernetes_validate.validate(found, "1.37", strict=True)
    found = manifests(rendered(run_file(tmp_path, SCRIPTS["ray"] + more), "k8s"))["RayCluster"]["spec"]
    for group in (found["headGroupSpec"], *found["workerGroupSpecs"]):
        # the schema of a RayCluster is KubeRay's, that of its pods is Kubernetes' own
        pods = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "p"}, "template": group["template"]}
        kubernetes_validate.validate(pods, "1.37", strict=True)


def test_a_ray_cluster_has_what_the_workers_of_the_run_need(tmp_path: Path) -> None:
    text = rendered(run_file(tmp_path, SCRIPTS["ray"] + "image = 'i'\nvolume_claim = 'v'\n"), "k8s")
    found = manifests(text)
    head, (group,) = found["RayCluster"]["spec"]["headGroupSpec"], found["RayCluster"]["spec"]["workerGroupSpecs"]
    assert head["rayStartParams"] == {"num-cpus": "0"}
    assert {group[key] for key in ("replicas", "minReplicas", "maxReplicas")} == {2}
    # three of the five workers at most
    assert group["template"]["spec"]["containers"][0]["resources"]["limits"] == {
        "cpu": 5, "nvidia.com/gpu": 2, "memory": 5 << 30,
    }  # fmt: skip
    assert group["rayStartParams"] == {"resources": """'{"docker": 1.5}'"""}
    name = found["RayCluster"]["metadata"]["name"]
    joins = found["Job"]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert f"ray start --address {name}-head-svc:6379 --num-cpus=0" in joins
    subprocess.run(["bash", "-n", "-c", joins], check=True)
    guarded = [one for one in yaml.safe_load_all(text) if one["kind"] == "NetworkPolicy"]
    parts = [one["spec"]["podSelector"]["matchLabels"].get("part") for one in guarded]
    # with Ray all pods of the run: rank 0's is a node of it, too
    assert parts == ["server", None]


def test_the_parts_of_the_manifests_find_each_other() -> None:
    found = manifests((ROOT / EXAMPLE).with_suffix(".yaml").read_text())
    trainer, server = found["Job"]["spec"]["template"], found["StatefulSet"]["spec"]["template"]
    container = trainer["spec"]["containers"][0]
    assert found["ConfigMap"]["data"]["run.toml"] == (ROOT / EXAMPLE).read_text()
    name = found["Service"]["metadata"]["name"]
    for part in (trainer, server):
        assert found["Service"]["spec"]["selector"].items() <= part["metadata"]["labels"].items()
    assert trainer["spec"]["subdomain"] == found["StatefulSet"]["spec"]["serviceName"] == name
    for number in (0, 1):
        host = f"{found['StatefulSet']['metadata']['name']}-{number}.{name}"
        assert f"http://{host}:8000/v1" in container["args"]
    assert f"--main_process_ip {found['Job']['metadata']['name']}-0.{name}" in container["command"][2]
    for part in (trainer, server):
        volumes = {volume["name"] for volume in part["spec"]["volumes"]}
        assert {mount["name"] for mount in part["spec"]["containers"][0]["volumeMounts"]} == volumes


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ('[server]\nurl = "http://h/v1"\n[cluster]\nserver_nodes = 1', "slurm", "or server_nodes = 0"),
        ('[server]\nlaunch = "vllm"', "slurm", "launch needs nodes here"),
        ('[server]\nlaunch = "embedded"\n[cluster]\nserver_nodes = 1', "slurm", "give [trainer] weight_sync_dir"),
        ("[cluster]\nserver_nodes = 1", "slurm", "give [server] launch"),
        ("[cluster]\ntrainer_nodes = 2", "slurm", "several processes train"),
        ('[workers]\nengine = "ray"\n[cluster]\nray_nodes = 1', "slurm", "give [workers] count, and start_timeout"),
        (
            '[workers]\nengine = "ray"\naddress = "h:1"\n[cluster]\nray_nodes = 1',
            "slurm",
            "leave out [workers] address",
        ),
        ("", "k8s", "--k8s needs [cluster] image"),
    ],
)
def test_what_cannot_be_launched_is_one_sentence(text: str, kind: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        rendered(run_file(tmp_path, text), kind)
    assert sentence in str(refused.value)


@pytest.mark.parametrize("name", ["7b", "123", "größtes" * 9, "数学"])
def test_a_name_that_kubernetes_refuses_is_refused_with_the_file(name: str, tmp_path: Path) -> None:
    file = tmp_path / f"{name}.toml"
    file.write_text(BASE + "[cluster]\nimage = 'i'\nvolume_claim = 'v'\n")
    with pytest.raises(ConfigError, match=rf"{name}\.toml: .*a letter first; rename the file"):
        rendered(str(file), "k8s")


def test_a_name_that_is_a_word_of_yaml_stays_text(tmp_path: Path) -> None:
    file = tmp_path / "on.toml"
    file.write_text(BASE + "[cluster]\nimage = 'i'\nvolume_claim = 'v'\n")
    found = manifests(rendered(str(file), "k8s"))
    assert found["ConfigMap"]["metadata"]["name"] == found["Service"]["spec"]["selector"]["run"] == "on"


def test_without_dry_run_it_is_submitted_or_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run_file(tmp_path, "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main([file, "--slurm"]) == 2
    assert "sbatch is not installed here; --dry-run prints" in capsys.readouterr().err
    (tmp_path / "sbatch").write_text(f"#!/bin/bash\n/bin/cat > '{tmp_path}/given'\nexit 3\n")
    (tmp_path / "sbatch").chmod(0o755)
    assert main([file, "--slurm"]) == 1
    assert "sbatch ended with exit code 3" in capsys.readouterr().err
    assert (tmp_path / "given").read_text() == rendered(file, "slurm")
    assert main([file]) == 2
