"""Names that Dagster accepts, for jobs, ops, sensors and tags, and the names of resources."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_]+")
_RESERVED = frozenset({"context", "conf", "config", "meta", "arg_dict", "dict", "input_arg_dict",
                       "output_arg_dict", "int", "str", "float", "bool", "input", "output", "type"})  # fmt: skip

_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9_.-]+")

TAG_NAMESPACE = "noetl_tag"

LOCATION = "noetl_dagster.definitions"
"""Module and name of the code location in workspace.yaml."""

POD_TAG = "dagster-k8s/config"
"""Tag of runs, and of the ops of steps, that ask for a pod: its configuration."""

NOETL = "noetl"
"""Key of the resource that provides the engine."""

PYSPARK = "pyspark"
"""Key of the resource that provides the Spark session."""


def dagster_name(name: str) -> str:
    """Replaces everything but letters, digits and underscores, and avoids the names that Dagster reserves."""
    clean = _NOT_ALLOWED.sub("_", name).strip("_") or "step"
    return f"{clean}_" if clean in _RESERVED else clean


def unique_names(names: Iterable[str]) -> dict[str, str]:
    """Returns a different Dagster name for each name: ``load-a`` and ``load_a`` do not collide."""
    names_by_source: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        candidate, count = dagster_name(name), 1
        while candidate in taken:
            count += 1
            candidate = f"{dagster_name(name)}_{count}"
        taken.add(candidate)
        names_by_source[name] = candidate
    return names_by_source


def tag_key(tag: str) -> str:
    """Returns the key of the Dagster tag for a tag of a playbook: ``noetl_tag/<tag>``.

    Dagster allows one slash in a key, and 63 letters, digits, ``_``, ``-`` and ``.`` on each side of it.
    """
    return f"{TAG_NAMESPACE}/{_NOT_IN_A_TAG.sub('_', tag)[:63]}"


def sensor_name(name: str, folder: str | None) -> str:
    """Returns the name of a sensor, different for each folder of playbooks in a project."""
    return f"{name}_{folder}" if folder else name
