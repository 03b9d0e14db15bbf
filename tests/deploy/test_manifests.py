"""compose.yaml and deploy/: they parse, fit Kubernetes' schemas, name nothing that does not exist, and keep to the rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from relay.cli import _parser
from relay.settings import SETTINGS, needed_by

ROOT = Path(__file__).resolve().parent.parent.parent
KUBERNETES = sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
YAML = sorted([ROOT / "compose.yaml", *(ROOT / "deploy").rglob("*.yml"), *(ROOT / "deploy").rglob("*.yaml")])
CUSTOM = {"PodMonitor"}
"""Kinds that Kubernetes itself does not know."""

VARIABLES = {setting.variable for setting in SETTINGS} | {
    f"{setting.variable}_FILE" for setting in SETTINGS if setting.is_secret
}
SECRETS = {setting.variable for setting in SETTINGS if setting.is_secret}


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def resources() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in KUBERNETES:
        for document in documents(path):
            yield path.name, document


def walk(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in a document."""
    if isinstance(node, dict):
        yield node
        node = list(node.values())
    if isinstance(node, list):
        for each in node:
            yield from walk(each)


def relays() -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(file, pod's spec, container) of every container of the relay's image."""
    for name, resource in resources():
        spec = resource.get("spec", {}).get("template", {}).get("spec", {})
        for container in [*spec.get("initContainers", []), *spec.get("containers", [])]:
            if container["image"].startswith("outbox-relay:"):
                yield name, spec, container


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_it_parses(path: Path) -> None:
    assert documents(path)


@pytest.mark.parametrize("version", ["1.29", "1.33"])
@pytest.mark.parametrize("path", KUBERNETES, ids=lambda path: path.stem)
def test_kubernetes_takes_it(path: Path, version: str) -> None:
    """`restartPolicy` of an init container is in the schemas from 1.29 on, which is what a native sidecar needs."""
    for resource in documents(path):
        if resource["kind"] not in CUSTOM:
            kubernetes_validate.validate(resource, version, strict=True)


def test_every_variable_exists() -> None:
    """A typo would be a warning in a log that nobody reads yet."""
    for path in YAML:
        named = set(re.findall(r"\bRELAY_[A-Z_]+", "\n".join(_uncommented(path))))
        assert named <= VARIABLES, f"{path.name}: {named - VARIABLES}"


def _uncommented(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        if not line.lstrip().startswith("#"):
            yield line


def test_secrets_are_files_in_kubernetes() -> None:
    """Not in the environment, and not mounted by subPath, which would never change."""
    found = list(relays())
    assert len(found) == 5
    for name, spec, container in found:
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert not SECRETS & set(variables), name
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        secrets = {volume["name"]: volume["secret"]["secretName"] for volume in spec["volumes"]}
        for variable, value in variables.items():
            if variable.endswith("_FILE"):
                directory, _, key = str(value).rpartition("/")
                mount = mounts[directory]
                assert "subPath" not in mount
                assert key in _keys_of_secret(secrets[mount["name"]]), f"{name}: {value}"


def _keys_of_secret(name: str) -> set[str]:
    (secret,) = (each for _, each in resources() if each["kind"] == "Secret" and each["metadata"]["name"] == name)
    return set(secret["stringData"])


def test_each_command_is_understood_and_has_the_settings_that_it_needs() -> None:
    for name, _, container in relays():
        words = container["args"]
        assert callable(_parser().parse_args(words).perform), name
        wanted = needed_by(" ".join(words[:2] if words[0] == "inbox" else words[:1]))
        assert wanted <= {variable["name"].removesuffix("_FILE") for variable in container["env"]}, name


def test_the_page_lists_every_manifest() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    assert set(re.findall(r"^\| `deploy/kubernetes/(\S+)`", page, re.MULTILINE)) == {path.name for path in KUBERNETES}


def test_a_relay_needs_no_right_at_its_machine() -> None:
    for name, spec, container in relays():
        pod, own = spec["securityContext"], container["securityContext"]
        assert own["readOnlyRootFilesystem"] is True, name
        assert own["allowPrivilegeEscalation"] is False, name
        assert own["capabilities"] == {"drop": ["ALL"]}, name
        assert (own | pod)["runAsNonRoot"] is True, name
        assert (own | pod)["runAsUser"] > 0, name
        assert pod["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is False, name
        assert container["resources"]["limits"]["memory"], name


@pytest.mark.parametrize("file", ["sidecar.yaml", "inbox-sidecar.yaml"])
def test_a_sidecar_is_native_and_probed_for_life_only(file: str) -> None:
    """`/readyz` would take the service down with the broker; a startup probe would make it wait for the relay."""
    ((_, spec, relay),) = (found for found in relays() if found[0] == file)
    assert relay in spec["initContainers"]
    assert relay["restartPolicy"] == "Always"
    assert relay["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert not {"readinessProbe", "startupProbe"} & set(relay)
    assert spec["terminationGracePeriodSeconds"] >= 10 + 30


def test_the_stand_alone_ones_are_two_and_say_when_they_work() -> None:
    (deployment,) = (each for name, each in resources() if name == "standalone.yaml" and each["kind"] == "Deployment")
    assert deployment["spec"]["replicas"] == 2
    ((_, spec, relay),) = (found for found in relays() if found[0] == "standalone.yaml")
    assert relay["livenessProbe"]["httpGet"]["path"] == "/livez"
    assert relay["readinessProbe"]["httpGet"]["path"] == "/readyz"
    assert spec["terminationGracePeriodSeconds"] > 8, "RELAY_SHUTDOWN_GRACE has to fit"


def test_what_selects_pods_finds_them() -> None:
    labels = [
        each["spec"]["template"]["metadata"]["labels"]
        for _, each in resources()
        if each["kind"] in {"Deployment", "Job"}
    ]
    for name, resource in resources():
        for selector in (
            each for key in ("selector", "podSelector") for each in [resource.get("spec", {}).get(key)] if each
        ):
            wanted = selector.get("matchLabels", {})
            expressions = selector.get("matchExpressions", [])
            found = [
                each
                for each in labels
                if wanted.items() <= each.items()
                and all(each.get(expression["key"]) in expression["values"] for expression in expressions)
            ]
            assert found, f"{name}: {resource['kind']} selects nothing"
    ports = {port["name"] for _, _, container in relays() for port in container.get("ports", [])}
    for _, resource in resources():
        if resource["kind"] == "Deployment" and "outbox-relay" in resource["spec"]["template"]["metadata"]["labels"]:
            assert resource["spec"]["template"]["metadata"]["labels"]["outbox"], "the rules tell outboxes apart by it"
    (monitor,) = (each for _, each in resources() if each["kind"] == "PodMonitor")
    assert monitor["spec"]["jobLabel"] == "outbox"
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports


def test_the_runbooks_commands_find_what_they_name() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    labels = [
        each["spec"]["template"]["metadata"]["labels"] for _, each in resources() if "template" in each.get("spec", {})
    ]
    selected = re.findall(r"kubectl .*-l (\S+)=([\w-]+)", page)
    assert selected
    for key, value in selected:
        assert any(each.get(key) == value for each in labels), f"{key}={value}"
    for name in (containers := re.findall(r"kubectl (?:exec|logs) POD -c (\w+)", page)):
        assert name in {container["name"] for _, _, container in relays()}
    assert len(containers) >= 2
    ports = {port["containerPort"] for _, _, container in relays() for port in container.get("ports", [])}
    assert set(map(int, re.findall(r"kubectl port-forward POD (\d+)", page))) <= ports
    services = documents(ROOT / "compose.yaml")[0]["services"]
    (service,) = re.findall(r"docker compose exec (\w+)", page)
    assert services[service]["ports"] == ["127.0.0.1:9761:9761"]


def test_compose_starts_what_is_there() -> None:
    compose = documents(ROOT / "compose.yaml")[0]
    services = compose["services"]
    assert {"postgres", "rabbitmq", "migrate", "relay", "prometheus", "grafana"} <= set(services)
    for name in ("migrate", "relay"):
        assert services[name]["read_only"] is True
        assert services[name]["cap_drop"] == ["ALL"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), f"{name}: fixed passwords stay on this machine"
        for volume in service.get("volumes", ()):
            assert (ROOT / volume.split(":")[0]).exists(), f"{name}: {volume}"


def test_prometheus_and_grafana_find_their_files() -> None:
    prometheus = ROOT / "deploy" / "prometheus"
    config = documents(prometheus / "prometheus.yml")[0]
    rules = {path.name for path in prometheus.glob("*.yml") if not path.name.endswith(".test.yml")}
    assert rules - {"prometheus.yml"} == set(config["rule_files"])
    services = documents(ROOT / "compose.yaml")[0]["services"]
    hosts = {
        target.split(":")[0]
        for job in config["scrape_configs"]
        for each in job["static_configs"]
        for target in each["targets"]
    }
    assert hosts <= set(services)
    (provider,) = documents(ROOT / "deploy/grafana/provisioning/dashboards/relay.yml")[0]["providers"]
    mounts = [volume.split(":") for volume in services["grafana"]["volumes"]]
    (dashboards,) = (source for source, target, _ in mounts if target == provider["options"]["path"])
    assert list((ROOT / dashboards).glob("*.json"))
    (source,) = documents(ROOT / "deploy/grafana/provisioning/datasources/prometheus.yml")[0]["datasources"]
    assert source["url"] == "http://prometheus:9090"
