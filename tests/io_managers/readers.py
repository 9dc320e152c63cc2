"""Assets that keep what they were given."""

from __future__ import annotations

from typing import Any

from dagster import AssetIn, AssetsDefinition, asset


def reader_of(name: str, of: AssetsDefinition, kind: Any, seen: dict[str, Any]) -> AssetsDefinition:
    """An asset that takes another as ``kind`` and keeps what it got under ``seen[name]``."""

    def read(value: Any) -> None:
        seen[name] = value

    read.__annotations__["value"] = kind
    return asset(name=f"read_{name}", ins={"value": AssetIn(of.key)})(read)
