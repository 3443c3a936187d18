"""The recipes in ``docker/``: right by the rules of those who read them, and by each other's."""

import json
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from compose_services import BIN, COMPOSE, REPOSITORY, SECRETS, needs_programs, resolved
from dmuon_platform import cli
from dmuon_platform.spec import load_job
from dmuon_platform.submission import STOP_WAIT_S

pytestmark = needs_programs

DOCKER = REPOSITORY / "docker"
SCHEMA = json.loads((Path(__file__).parents[1] / "schemas" / "rayjob.json").read_text())
KUBERNETES = "1.34"
VERSION_OF_RAY = re.search(r"^ray==(.*)$", (REPOSITORY / "constraints.txt").read_text(), re.M)


@pytest.fixture(scope="module")
def manifests() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((DOCKER / "rayjob.yaml").read_text()))


def templates(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]


def check_command(words: list[str]) -> None:
    """Parse a command of ours and the job that it names, as ``dmuon`` itself would."""
    assert words[0] == "dmuon"
    arguments = cli._parser().parse_args(words[1:])
    job = REPOSITORY / "jobs" / Path(arguments.job).name
    spec = load_job(job, arguments.set)
    assert spec.storage == "/storage"
    assert spec.tracking.uri == "http://mlflow:5000"


def test_hadolint_has_nothing_to_say_about_the_dockerfile() -> None:
    command = [BIN / "hadolint", "--failure-threshold", "style", DOCKER / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_dockerfile_copies_what_there_is_and_nothing_else_is_sent() -> None:
    lines = (DOCKER / "Dockerfile").read_text().splitlines()
    copies = [line.split()[1:-1] for line in lines if line.startswith("COPY ")]
    sources = {source for words in copies if "--from=wheel" not in words for source in words}
    assert all((REPOSITORY / source).exists() for source in sources)
    sent = re.findall(r"^!(.*)$", (DOCKER / "Dockerfile.dockerignore").read_text(), re.M)
    assert sources == set(sent)


def test_compose_takes_the_file_and_demands_the_secrets() -> None:
    services = resolved(**SECRETS)["services"]
    assert set(services) == {"head", "worker-1", "worker-2", "postgres", "mlflow", "train"}
    for name in SECRETS:
        with pytest.raises(ValueError, match=name):
            resolved(**{key: value for key, value in SECRETS.items() if key != name})
    example = (DOCKER / ".env.example").read_text()
    asked = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    assert asked == set(re.findall(r"^(\w+)=", example, re.M))


def test_the_services_of_a_cluster_fit_each_other() -> None:
    services = resolved(**SECRETS)["services"]
    cluster = [services[name] for name in ("head", "worker-1", "worker-2", "train")]
    assert {each["environment"]["RAY_AUTH_MODE"] for each in cluster} == {"token"}
    assert all(each["volumes"] == cluster[0]["volumes"] for each in cluster)
    images = {service["image"] for name, service in services.items() if name != "postgres"}
    assert len(images) == 1
    for each in cluster:
        used = [word for word in each["command"] if word.startswith("--object-store-memory=")]
        assert all(int(word.partition("=")[2]) < int(each["shm_size"]) for word in used)
    waited = services["train"]["depends_on"]
    assert {how["condition"] for how in waited.values()} == {"service_healthy"}
    assert set(waited) == {"head", "worker-1", "worker-2", "mlflow"}
    assert all("healthcheck" in services[name] for name in waited)
    published = [port for service in services.values() for port in service.get("ports", ())]
    assert {port["host_ip"] for port in published} == {"127.0.0.1"}
    check_command(services["train"]["command"])


def test_kubernetes_and_kuberay_take_the_manifest(manifests: list[dict[str, Any]]) -> None:
    claim, job = manifests
    kubernetes_validate.validate(claim, KUBERNETES, strict=True)
    jsonschema.validate(job, SCHEMA)
    for number, spec in enumerate(templates(job)):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": str(number)}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        mounted = {mount["name"] for each in spec["containers"] for mount in each["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]} == {"storage", "shm"}
        (storage,) = [one for one in spec["volumes"] if one["name"] == "storage"]
        assert storage["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert spec["terminationGracePeriodSeconds"] > STOP_WAIT_S


def test_a_misspelt_or_misplaced_key_of_the_manifest_is_found(
    manifests: list[dict[str, Any]],
) -> None:
    job = manifests[1]
    for change in ({"backofLimit": 1}, {"backoffLimit": "1"}, {"replicas": 2}):
        wrong = {**job, "spec": {**job["spec"], **change}}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, SCHEMA)


def test_the_job_of_the_manifest_resumes_by_name_and_has_time_to_save(
    manifests: list[dict[str, Any]],
) -> None:
    spec = manifests[1]["spec"]
    check_command(shlex.split(spec["entrypoint"]))
    runtime = yaml.safe_load(spec["runtimeEnvYAML"])
    assert runtime == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S)}}
    assert spec["backoffLimit"] > 0
    assert VERSION_OF_RAY is not None
    assert spec["rayClusterSpec"]["rayVersion"] == VERSION_OF_RAY[1]
    workers = spec["rayClusterSpec"]["workerGroupSpecs"]
    assert sum(group["minReplicas"] for group in workers) >= 2
    name = load_job(REPOSITORY / "jobs" / "tiny_cpu.toml").name
    assert spec["metadata"] == {"dmuon_name": name}
