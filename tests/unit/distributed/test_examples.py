"""The cluster examples: the manifest has the fields that KubeRay's RayJob asks for, the script is valid bash."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "cluster"


def table(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """A JSON schema of an object that has these fields and no others."""
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
            assert mounts["shm"] == "/dev/shm"  # Ray's object store; a pod's own has 64 MiB
            assert container["resources"]["limits"] == container["resources"]["requests"]
            assert container["image"] == cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["image"]
    for workers in cluster["workerGroupSpecs"]:
        assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]


def test_the_slurm_script_is_bash_and_uses_what_there_is() -> None:
    path = EXAMPLES / "slurm.sh"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text()
    assert set(re.findall(r"magicrl (\w+)", re.sub(r"#.*", "", text))) == {"cluster", "train"}
