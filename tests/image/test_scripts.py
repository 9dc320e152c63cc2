"""The shell scripts, and what scripts/kind gives the chart."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from noetl_dagster.playbook.loader import load_playbook
from tests.conftest import PROJECT
from tests.helm.chart import KIND, manifests, of_kind, overlaid

SCRIPTS = sorted(path for path in (PROJECT / "scripts").iterdir() if path.is_file() and "." not in path.name)
KIND_VALUES = yaml.safe_load((PROJECT / "scripts" / "kind-values.yaml").read_text())


def shellcheck(path: Path) -> str:
    program = Path(sys.executable).with_name("shellcheck")
    return subprocess.run([program, path], capture_output=True, text=True).stdout


@pytest.mark.parametrize("path", [*SCRIPTS, PROJECT / ".ci" / "run"], ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path: Path) -> None:
    if "bash" in path.read_text().partition("\n")[0]:
        assert not shellcheck(path)


def test_shellcheck_would_speak(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("#!/usr/bin/env bash\nrm $1\n")
    assert "SC2086" in shellcheck(tmp_path / "script")


def test_what_kind_adds_is_valid_and_found_by_its_names() -> None:
    objects = manifests(overlaid(KIND, KIND_VALUES), release="noetl")
    for kind in ("Deployment", "Service"):
        kubernetes_validate.validate(of_kind(objects, kind)["records"], "1.37", strict=True)
    settings = of_kind(objects, "ConfigMap")["noetl-noetl-dagster-settings"]["data"]
    assert settings["NOETL_CREDENTIAL_RECORDS_API"] == "http://records:8765"
    script = (PROJECT / "scripts" / "kind").read_text()
    named = set(re.findall(r'"(deployment|statefulset|pod)/\$full-([a-z]+)', script))
    assert named
    for kind, component in named:
        made = of_kind(objects, "Deployment" if kind == "deployment" else "StatefulSet")
        assert f"noetl-noetl-dagster-{component}" in made
    killed = re.search(r"for part in (run worker-default .*); do", script)
    assert killed is not None
    components = {one["metadata"].get("labels", {}).get("app.kubernetes.io/component") for one in objects}
    assert set(killed[1].split()) - {"run"} <= components


def test_the_container_playbook_of_kind_loads() -> None:
    assert load_playbook(PROJECT / "scripts" / "kind-container.yaml").metadata.path == "kind/container"
