"""Names of ops, outputs and assets for the steps of a playbook."""

from __future__ import annotations

import re
from collections.abc import Iterable

from dagster import AssetKey

from noetl_dagster.playbook.models import Playbook

_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_]+")
_RESERVED = frozenset({"context", "conf", "config", "meta", "arg_dict", "dict", "input_arg_dict",
                       "output_arg_dict", "int", "str", "float", "bool", "input", "output", "type"})  # fmt: skip

_NOT_IN_A_TAG = re.compile(r"[^A-Za-z0-9_.-]+")

TAG_NAMESPACE = "noetl_tag"
GROUP_SUFFIX = "_group"
FANIN_SUFFIX = "_fanin"


def dagster_name(name: str) -> str:
    """A name that Dagster accepts: letters, digits and underscores, not one of its own words."""
    clean = _NOT_ALLOWED.sub("_", name).strip("_") or "step"
    return f"{clean}_" if clean in _RESERVED else clean


def unique_names(names: Iterable[str]) -> dict[str, str]:
    """Dagster names of many things, each its own: ``load-a`` and ``load_a`` do not collide."""
    given: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        candidate, count = dagster_name(name), 1
        while candidate in taken:
            count += 1
            candidate = f"{dagster_name(name)}_{count}"
        taken.add(candidate)
        given[name] = candidate
    return given


def tag_key(tag: str) -> str:
    """The key of a Dagster tag that stands for a tag of a playbook: ``noetl_tag/<tag>``.

    Dagster allows one slash in a key, and 63 letters, digits, ``_``, ``-`` and ``.`` on each side of it.
    """
    return f"{TAG_NAMESPACE}/{_NOT_IN_A_TAG.sub('_', tag)[:63]}"


def sensor_name(name: str, among: str | None) -> str:
    """The name of a sensor over some playbooks of a project, set apart from those over others."""
    return f"{name}_{among}" if among else name


def asset_key(playbook: Playbook, step: str) -> AssetKey:
    """The step's own key, or ``[<parts of the playbook's path>..., <step>]``."""
    return AssetKey(playbook.asset_key(step))
