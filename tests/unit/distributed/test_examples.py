"""The cluster examples: the manifest has the fields of KubeRay's RayJob, and the script is valid bash."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "cluster"


def table(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """Return a JSON schema of an object that has exactly these fields."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(\.\d+)?(m|[KMGT]i?)?$"}}


def several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


CONTAINER = table(
    ("name", "image"),
    name=TEXT,
    image=TEXT,
    ports=several(table(("containerPort",), containerPort=COUNT, name={"type": "string", "maxLength": 15})),
    resources=table(limits=QUANTITIES, requests=QUANTITIES),
    volumeMounts=several(table(("name", "mountPath"), name=TEXT, mountPath=TEXT)),
)
VOLUME = table(
    ("name",),
    name=TEXT,
    persistentVolumeClaim=table(("claimName",), claimName=TEXT),
    emptyDir=table(medium={"enum": ["", "Memory"]}, sizeLimit=TEXT),
)
POD = table(("spec",), spec=table(("containers",), containers=several(CONTAINER), volumes=several(VOLUME)))
HEAD = table(("template",), rayStartParams=TEXTS, template=POD)
WORKERS = table(
    ("groupName", "template"),
    groupName=TEXT,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    rayStartParams=TEXTS,
    template=POD,
)
RAY_JOB = table(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=table(("name",), name=TEXT, namespace=TEXT),
    spec=table(
        ("entrypoint", "rayClusterSpec"),
        entrypoint=TEXT,
        backoffLimit=COUNT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=table(
            ("headGroupSpec",), rayVersion=TEXT, headGroupSpec=HEAD, workerGroupSpecs=several(WORKERS)
        ),
    ),
)


@pytest.fixture
def manifest() -> Any:
    return yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text())


def test_the_manifest_has_the_fields_of_a_ray_job(manifest: Any) -> None:
    jsonschema.validate(manifest, RAY_JOB)
    manifest["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 2
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(manifest, RAY_JOB)


def test_the_manifest_hangs_together(manifest: Any) -> None:
    cluster = manifest["spec"]["rayClusterSpec"]
    pins = (EXAMPLES.parents[1] / "constraints.txt").read_text()
    assert f"ray=={cluster['rayVersion']}\n" in pins
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
            assert set(mounts) == volumes
            assert mounts["shm"] == "/dev/shm"  # Ray's object store; a pod's default has 64 MiB
            assert container["resources"]["limits"] == container["resources"]["requests"]
            assert container["image"] == cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    for workers in cluster["workerGroupSpecs"]:
        assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


def test_the_slurm_script_is_bash_and_uses_what_there_is() -> None:
    path = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert set(re.findall(r"magicrl (\w+)", re.sub(r"#.*", "", text))) == {"cluster", "train"}


def test_a_slurm_job_that_meets_its_time_limit_ends_with_the_status_of_the_run() -> None:
    assert 'wait "$run"; exit $?\' TERM' in (EXAMPLES / "slurm.sh").read_text()


def test_the_image_installs_what_the_project_has() -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    for name in re.findall(r"^COPY (.+) \S+$", text, re.MULTILINE):
        assert all((EXAMPLES.parents[1] / file).exists() for file in name.split())
    extras = re.search(r"'\.\[(.+)]'", text)
    project = tomllib.loads((EXAMPLES.parents[1] / "pyproject.toml").read_text())["project"]
    assert extras
    assert set(extras[1].split(",")) <= set(project["optional-dependencies"])


def test_the_skypilot_task_names_a_recipe_and_commands_that_exist() -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    assert (EXAMPLES.parents[1] / task["envs"]["RECIPE"]).exists()
    assert set(re.findall(r"magicrl (\w+)", task["run"])) == {"cluster", "train"}
    subprocess.run(["bash", "-n"], input=task["run"], text=True, check=True)
