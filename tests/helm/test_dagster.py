"""Dagster itself loads what the chart writes for it: dagster.yaml and workspace.yaml."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import DagsterInstance
from dagster._config import validate_config
from dagster._core.instance.config import dagster_instance_config_schema

from noetl_dagster.settings import Settings
from tests.helm.chart import KIND, SCENARIOS, Manifest, component, dagster_yaml, manifests, overlaid
from tests.helm.launched import run_pods


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_dagster_yaml_is_what_dagster_s_schema_takes(scenario: str) -> None:
    checked = validate_config(dagster_instance_config_schema(), dagster_yaml(manifests(SCENARIOS[scenario])))
    assert checked.success, checked.errors


@pytest.fixture
def home(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """DAGSTER_HOME with the rendered dagster.yaml, in the environment of its pods; folders of pods are here."""
    objects = manifests(KIND)
    text = yaml.safe_dump(dagster_yaml(objects)).replace("/var/lib/noetl", str(tmp_path / "noetl"))
    assert settings.dagster_db_url is not None
    assert settings.dagster_db_url.startswith("postgresql://")
    for name, value in environment(settings, objects, tmp_path).items():
        monkeypatch.setenv(name, value)
    folder = tmp_path / "dagster-home"
    folder.mkdir()
    (folder / "dagster.yaml").write_text(text)
    return folder


def environment(settings: Settings, objects: list[Manifest], tmp_path: Path) -> dict[str, str]:
    """The variables of the code location, with the addresses of the embedded services."""
    secret = {
        "NOETL_DB_URL": settings.db_url,
        "NOETL_DAGSTER_DB_URL": settings.dagster_db_url,
        "NOETL_NATS_URL": settings.nats_url,
        "NOETL_MINIO_ENDPOINT": settings.minio_endpoint,
        "NOETL_MINIO_ACCESS_KEY": settings.minio_access_key,
        "NOETL_MINIO_SECRET_KEY": settings.minio_secret_key.get_secret_value(),
    }
    own = {"NOETL_HOME": str(tmp_path / "noetl"), "NOETL_PLAYBOOKS_PATH": str(tmp_path / "playbooks")}
    stated = component(objects, "code-location").variables(objects)
    return {**stated, **{name: value for name, value in secret.items() if value}, **own}


def test_a_real_instance_is_made_of_it(home: Path) -> None:
    with DagsterInstance.from_config(str(home)) as instance:
        assert instance.get_runs_count() == 0  # PostgreSQL, at a bare postgresql:// address
        assert type(instance.run_coordinator).__name__ == "QueuedRunCoordinator"
        assert instance.get_concurrency_config().run_queue_config.max_concurrent_runs == 4
        assert instance.run_monitoring_enabled
        assert type(instance.compute_log_manager).__name__ == "StoredRunLogs"
        assert not instance.telemetry_enabled
        reference = instance.get_ref()
        with DagsterInstance.from_ref(reference) as again:  # as the pods of runs have it
            assert again.get_runs_count() == 0


def test_compute_logs_go_to_the_store_of_results() -> None:
    found = {name: dagster_yaml(manifests(values))["compute_logs"] for name, values in SCENARIOS.items()}
    assert found["gke"]["class"] == "RunLogs", "the image has no dagster-gcp"
    assert found["eks"]["class"] == found["kind"]["class"] == "StoredRunLogs"
    assert "endpoint_url" not in found["eks"]["config"]
    assert "endpoint_url" in found["kind"]["config"]
    gcs = overlaid(SCENARIOS["gke"], {"dagster": {"computeLogs": {"manager": "gcs"}}})
    logs = dagster_yaml(manifests(gcs))["compute_logs"]
    assert (logs["class"], logs["config"]["bucket"]) == ("GCSComputeLogManager", "my-project-noetl-results")
    assert found["own S3"]["class"] == "S3ComputeLogManager"
    assert found["shared claim"]["class"] == "RunLogs"


def test_runs_have_what_code_locations_have() -> None:
    objects = manifests(SCENARIOS["everything"])
    run, code = run_pods(objects), component(objects, "code-location")
    assert run.container["image"] == code.container["image"]
    assert run.spec["nodeSelector"] == code.spec["nodeSelector"]
    assert run.spec["imagePullSecrets"] == [{"name": "registry"}]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in run.container["env"]
    assert {"configMapRef": {"name": "proxies"}} in run.container["envFrom"]
    assert run.labels["cost"] == "data"
    secrets = [one for one in code.container["env"] if "valueFrom" in one]
    assert [one for one in secrets if one not in run.container["env"]] == []


@pytest.mark.parametrize(
    ("asked", "refused"),
    [
        ({"container_config": {"resources": {"limits": {"cpu": "8"}}}}, ""),
        ({"pod_spec_config": {"node_selector": {"gpu": "yes"}, "tolerations": [{"operator": "Exists"}]}}, ""),
        ({"container_config": {"image": "own:1"}}, "container_config.image"),
        ({"pod_spec_config": {"service_account_name": "daemon"}}, "pod_spec_config.service_account_name"),
        ({"container_config": {"env_from": [{"secret_ref": {"name": "noetl"}}]}}, "container_config.env_from"),
        ({"pod_spec_config": {"volumes": [{"name": "a", "secret": {"secret_name": "x"}}]}}, "pod_spec_config.volumes"),
        ({"pod_template_spec_metadata": {"labels": {"a": "b"}}}, "pod_template_spec_metadata.labels"),
    ],
)
def test_tags_of_runs_set_only_what_is_harmless(asked: dict[str, Any], refused: str) -> None:
    """Whoever launches a run writes its tags."""
    if not refused:
        run_pods(manifests(KIND), asked)
        return
    with pytest.raises(Exception, match=f"violated the allowed list: {refused}"):
        run_pods(manifests(KIND), asked)


def test_a_run_asks_for_another_pod_by_its_tags_where_any_field_is_allowed() -> None:
    objects = manifests(overlaid(KIND, {"runs": {"allowedFields": None}}))
    asked: dict[str, Any] = {
        "container_config": {"image": "own:1", "env": [{"name": "OWN", "value": "1"}]},
        "pod_spec_config": {"node_selector": {"gpu": "yes"}, "service_account_name": "own"},
    }
    run = run_pods(objects, asked)
    assert run.container["image"] == "own:1"
    assert run.spec["nodeSelector"] == {"gpu": "yes"}
    assert run.spec["serviceAccountName"] == "own"
    names = [one["name"] for one in run.container["env"]]
    assert {"OWN", "NOETL_DB_URL"} <= set(names)
    assert run.container["securityContext"]["readOnlyRootFilesystem"] is True
