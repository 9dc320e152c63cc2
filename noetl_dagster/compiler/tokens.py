"""IO manager of what ops hand each other: nothing but tokens and the names of groups."""

from __future__ import annotations

from typing import Any

from dagster import InputContext, IOManager, OutputContext, io_manager

from noetl_dagster.engine.fanout.shards import Group

TOKENS = "noetl_tokens"
"""Resource key of the token IO manager."""


class TokenIOManager(IOManager):
    """Keeps nothing: a group of shards is written in its mapping key, all other state is in the log."""

    def handle_output(self, context: OutputContext, obj: Any) -> None:
        pass

    def load_input(self, context: InputContext) -> Any:
        upstream = context.upstream_output
        key = upstream.mapping_key if upstream is not None else None
        return Group.parse(key) if key is not None else None


@io_manager
def token_io_manager() -> TokenIOManager:
    return TokenIOManager()
