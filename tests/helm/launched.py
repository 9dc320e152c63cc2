"""The Job of a run as dagster-k8s makes it from a rendered ``dagster.yaml``: no cluster is asked."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import orjson
import yaml
from dagster import DagsterRun
from dagster._config import process_config
from dagster_k8s import K8sRunLauncher
from dagster_k8s.container_context import K8sContainerContext
from dagster_k8s.job import construct_dagster_k8s_job
from kubernetes.client import ApiClient

from tests.helm.chart import Manifest, Pods, dagster_yaml


def run_job(objects: list[Manifest], asked: dict[str, Any] | None = None) -> Manifest:
    """The Job of a run.

    Args:
        asked: its tag ``dagster-k8s/config``, what a playbook says of its pod.

    Raises:
        AssertionError: Dagster refuses the configuration of its launcher.
    """
    config = orjson.dumps(dagster_yaml(objects)["run_launcher"]["config"])
    job: Manifest = orjson.loads(_job(config, orjson.dumps(asked or {}).decode()))
    return job


@cache
def _job(config: bytes, asked: str) -> bytes:
    launcher = _launcher(config)
    tags = {"dagster-k8s/config": asked} if asked != "{}" else {}
    run = DagsterRun(job_name="squares", tags=tags)
    context = K8sContainerContext.create_for_run(run, launcher, include_run_tags=True)
    job = construct_dagster_k8s_job(
        context.get_k8s_job_config(job_image=None, run_launcher=launcher),
        args=["dagster", "api", "execute_run"],
        job_name="dagster-run-1",
        component="run_worker",
        user_defined_k8s_config=context.run_k8s_config,
    )
    return orjson.dumps(ApiClient().sanitize_for_serialization(job))


def run_pods(objects: list[Manifest], asked: dict[str, Any] | None = None) -> Pods:
    """The pod of such a Job."""
    template = run_job(objects, asked)["spec"]["template"]
    return Pods("Job", "dagster-run-1", template["metadata"]["labels"], template["spec"])


@cache
def _launcher(config: bytes) -> K8sRunLauncher:
    checked = process_config(K8sRunLauncher.config_type(), orjson.loads(config))
    assert checked.success, checked.errors
    stated: dict[str, Any] = checked.value or {}
    return K8sRunLauncher(**{**stated, "load_incluster_config": False, "kubeconfig_file": _kubeconfig()})


@cache
def _kubeconfig() -> str:
    """Leads nowhere."""
    folder = Path(tempfile.mkdtemp(prefix="noetl-kubeconfig-"))
    own = {"name": "none", "cluster": {"server": "https://127.0.0.1:1"}}
    context = {"name": "none", "context": {"cluster": "none", "user": "none"}}
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [own],
        "contexts": [context],
        "users": [{"name": "none", "user": {}}],
        "current-context": "none",
    }
    (folder / "config").write_text(yaml.safe_dump(content))
    return str(folder / "config")
