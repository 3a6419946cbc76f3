"""packaging/kubernetes.yaml against Kubernetes' own schemas, and what no schema says. No cluster is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from aqd.config import Daemon

yaml = pytest.importorskip("yaml")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

FILE = Path(__file__).parents[2] / "packaging/kubernetes.yaml"
# From before the oldest that is supported by anybody to the newest that the validator knows.
VERSIONS = ("1.28.0", "1.31.0", "1.34.0", kubernetes_validate.latest_version())


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    """By kind and name: Deployment/aqd-api."""
    return {
        f"{each['kind']}/{each['metadata']['name']}": each for each in yaml.safe_load_all(FILE.read_text())
    }


def pods(manifests: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: each["spec"]["template"]["spec"]
        for name, each in manifests.items()
        if "template" in each["spec"]
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_schema(manifests: dict[str, dict[str, Any]], version: str) -> None:
    assert len(manifests) == 4
    for each in manifests.values():
        kubernetes_validate.validate(each, version, strict=True)


def test_the_schema_would_notice(manifests: dict[str, dict[str, Any]]) -> None:
    wrong = manifests["Service/aqd-api"] | {"spec": {**manifests["Service/aqd-api"]["spec"], "portz": []}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[-1], strict=True)


def test_every_container_is_confined(manifests: dict[str, dict[str, Any]]) -> None:
    for name, pod in pods(manifests).items():
        assert pod["securityContext"]["runAsNonRoot"], name
        assert pod["automountServiceAccountToken"] is False
        for each in [*pod.get("initContainers", []), *pod["containers"]]:
            context = each["securityContext"]
            assert context["readOnlyRootFilesystem"], name
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert not [variable for variable in each["env"] if "://" in variable["value"]]
            mounts = {mount["name"] for mount in each["volumeMounts"]}
            assert mounts <= {volume["name"] for volume in pod["volumes"]}


def test_there_is_time_to_drain(manifests: dict[str, dict[str, Any]]) -> None:
    from aqd.master import FINAL_S

    pod = pods(manifests)["Deployment/aqd-daemon"]
    defaults = Daemon()
    assert pod["terminationGracePeriodSeconds"] > defaults.drain_s + defaults.kill_grace_s + FINAL_S
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["aqd", "stop"]


def test_selectors_fit(manifests: dict[str, dict[str, Any]]) -> None:
    services = [each for each in manifests.values() if each["kind"] == "Service"]
    deployments = [each for each in manifests.values() if each["kind"] == "Deployment"]
    labels = [each["spec"]["template"]["metadata"]["labels"] for each in deployments]
    for each, own in zip(deployments, labels, strict=True):
        assert each["spec"]["selector"]["matchLabels"].items() <= own.items()
    for service in services:
        assert len([own for own in labels if service["spec"]["selector"].items() <= own.items()]) == 1
