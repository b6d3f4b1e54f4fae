"""The manifests in deploy/kubernetes: valid by the schemas of Kubernetes, and in agreement with the fleet's file."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from kvasir.cli.app import app
from kvasir.cli.cluster.config import read_config
from tests.cli.running import ROOT

FOLDER = ROOT / "deploy" / "kubernetes"
# The fields of KubeRay's types (ray-operator/apis/ray/v1) that the manifests use.
RAY_SERVICE = {"serveConfigV2", "rayClusterConfig"}
RAY_CLUSTER = {"rayVersion", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec", "workerGroupSpecs"}
HEAD = {"rayStartParams", "template"}
WORKERS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
OF_A_NODE = 0.7  # of a pod's memory, that Ray counts as a resource: the rest is for objects


def documents() -> list[dict[str, Any]]:
    names = load("kustomization.yaml")[0]["resources"]
    return [one for name in names for one in load(name)]


@cache
def load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def one(kind: str) -> dict[str, Any]:
    [found] = [document for document in documents() if document["kind"] == kind]
    return found


def cluster() -> dict[str, Any]:
    return one("RayService")["spec"]["rayClusterConfig"]


def templates() -> Iterator[dict[str, Any]]:
    yield cluster()["headGroupSpec"]["template"]
    for group in cluster()["workerGroupSpecs"]:
        yield group["template"]


def amount(text: str) -> float:
    """A quantity of Kubernetes, in cores or bytes."""
    found = re.fullmatch(r"(\d+)(m|Mi|Gi)?", text)
    assert found, text
    return int(found[1]) * {None: 1, "m": 1e-3, "Mi": 1 << 20, "Gi": 1 << 30}[found[2]]


def valid(document: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate")
    validate.validate(document, validate.latest_version(), strict=True)


def test_what_kubernetes_defines_is_valid():
    checked = [document for document in documents() if document["kind"] != "RayService"]
    for document in checked:
        valid(document)
    assert {document["kind"] for document in checked} == {"Service", "NetworkPolicy"}
    for template in templates():
        metadata = {"name": "x", **template["metadata"]}
        valid({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


def test_the_check_can_fail():
    validate = pytest.importorskip("kubernetes_validate")
    template = deepcopy(next(templates()))
    template["spec"]["containers"][0]["portz"] = []
    with pytest.raises(validate.ValidationError):
        valid({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": template["spec"]})


def test_what_kuberay_defines_has_its_fields():
    service = one("RayService")
    assert service["apiVersion"] == "ray.io/v1" and service["spec"].keys() == RAY_SERVICE
    assert cluster().keys() == RAY_CLUSTER and cluster()["headGroupSpec"].keys() == HEAD
    for group in cluster()["workerGroupSpecs"]:
        assert group.keys() == WORKERS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    assert all(isinstance(value, str) for value in cluster()["headGroupSpec"]["rayStartParams"].values())
    pins = (ROOT / "constraints.txt").read_text()
    assert f"ray=={cluster()['rayVersion']}" in pins, "the version in the image"


def test_the_application_is_there_and_reads_the_mounted_file():
    [application] = yaml.safe_load(one("RayService")["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    [generated] = load("kustomization.yaml")[0]["configMapGenerator"]
    [volume] = [v for v in next(templates())["spec"]["volumes"] if v.get("configMap")]
    assert volume["configMap"]["name"] == generated["name"]
    [file] = generated["files"]
    assert application["args"]["config"] == f"{mounts()[volume['name']]}/{file}"
    given = json.loads(
        cluster()["headGroupSpec"]["rayStartParams"]["resources"].strip("'").strip('"').replace("\\", "")
    )
    assert given[application["args"]["resource"]] == 1


def mounts(template: int = 0) -> dict[str, str]:
    """The volumes of a pod and where its container has them."""
    spec = [*templates()][template]["spec"]
    return {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}


def test_the_server_is_where_the_service_looks():
    plan = read_config(FOLDER / "fleet.yaml")
    head, *_ = templates()
    service = one("Service")["spec"]
    assert service["selector"].items() <= head["metadata"]["labels"].items()
    assert not any(service["selector"].items() <= other["metadata"]["labels"].items() for other in [*templates()][1:])
    ports = {port["name"]: port["containerPort"] for port in head["spec"]["containers"][0]["ports"]}
    assert ports[service["ports"][0]["targetPort"]] == plan.server.port != ports["serve"]
    assert one("Service")["metadata"]["name"] in plan.server.allowed_host


def test_files_that_the_fleet_names_are_mounted():
    plan = read_config(FOLDER / "fleet.yaml")
    assert plan.reach and plan.server.keys and plan.server.operation.data_dir
    shared = [plan.reach.key, plan.reach.cert, plan.reach.cert_key, plan.reach.ca]
    for pod, paths in enumerate(([*shared, plan.server.keys, plan.server.operation.data_dir], shared)):
        there = mounts(pod).values()
        assert all(any(str(path).startswith(folder) for folder in there) for path in paths)
    page = (ROOT / "docs" / "howto" / "kubernetes.md").read_text()
    for path in {*shared, plan.server.keys}:
        assert f"--from-file={path.name}" in page, "the page says how the Secret is made"
    secrets = {v["secret"]["secretName"] for t in templates() for v in t["spec"]["volumes"] if "secret" in v}
    assert all(f"secret generic {name} " in page for name in secrets)
    assert plan.reach.name in page


def test_the_file_can_be_checked_where_its_secrets_are_not():
    result = CliRunner().invoke(app, ["fleet", str(FOLDER / "fleet.yaml"), "--check"])
    assert result.exit_code == 0, result.exception
    assert "http://0.0.0.0:8080" in result.output and "without keys" not in result.output


def test_replicas_fit_into_the_workers():
    plan = read_config(FOLDER / "fleet.yaml")
    [group] = cluster()["workerGroupSpecs"]
    [container] = group["template"]["spec"]["containers"]
    limits = {name: amount(text) for name, text in container["resources"]["limits"].items()}
    for model in plan.models:
        needs = model.resources
        assert needs.cpus <= limits["cpu"] and (needs.memory_bytes or 0) <= OF_A_NODE * limits["memory"]
        each = int(limits["cpu"] // needs.cpus)
        assert model.fleet.most <= each * group["maxReplicas"], "all replicas that there may be have a place"


def test_the_container_has_the_extra_and_the_command_of_the_page():
    text = (ROOT / "deploy" / "Containerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert ".[fleet]" in text and "fleet" in extras
    [command] = re.findall(r"^CMD (.*)$", text, re.MULTILINE)
    assert json.loads(command) == ["kvasir", "fleet", "fleet.yaml"]


def test_the_package_can_be_built_from_what_the_container_copies(tmp_path):
    pytest.importorskip("scikit_build_core")
    text = (ROOT / "deploy" / "Containerfile").read_text()
    copied = [word for words in re.findall(r"^COPY (?!--)(.*) \S+$", text, re.MULTILINE) for word in words.split()]
    for name in copied:
        assert (ROOT / name).exists(), name
        (tmp_path / name).symlink_to(ROOT / name)
    code = "from scikit_build_core.build import prepare_metadata_for_build_wheel as make; make('metadata')"
    made = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
