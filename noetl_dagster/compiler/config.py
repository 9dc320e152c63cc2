"""The workload as run config: the Launchpad shows its keys with their defaults."""

from __future__ import annotations

from typing import Any

from dagster import Array, ConfigMapping, Field, Noneable, Permissive

from noetl_dagster.playbook.models import Playbook

WORKLOAD = "workload"


def workload_mapping(playbook: Playbook, entry_op: str) -> ConfigMapping:
    """Maps ``ops: {<job>_playbook: {config: {<key>: <value>}}}`` to the op that starts the execution.

    Keys that the playbook does not have are accepted: child playbooks and templates may ask for them.
    """
    fields = {str(key): _field(value) for key, value in playbook.workload.items()}

    def to_entry(config: dict[str, Any]) -> dict[str, Any]:
        changed = {key: value for key, value in config.items() if playbook.workload.get(key) != value}
        return {entry_op: {"config": {WORKLOAD: changed}}}

    return ConfigMapping(config_fn=to_entry, config_schema=Permissive(fields))


def _field(default: Any) -> Field:
    """A field of the default's type; text may hold a template, which takes any value."""
    if isinstance(default, bool):
        return Field(bool, default_value=default, is_required=False)
    if isinstance(default, int):
        return Field(int, default_value=default, is_required=False)
    if isinstance(default, float):
        return Field(float, default_value=default, is_required=False)
    if isinstance(default, str) and "{{" not in default:
        return Field(str, default_value=default, is_required=False)
    if isinstance(default, list) and default and all(isinstance(item, str) for item in default):
        return Field(Array(str), default_value=default, is_required=False)
    if isinstance(default, dict):
        return Field(Permissive(), default_value=default, is_required=False)
    return Field(Noneable(_anything()), default_value=default, is_required=False)


def _anything() -> Any:
    from dagster import Any as AnyType

    return AnyType
