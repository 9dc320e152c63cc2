"""Commands that are imported when they are called: help and mistyped options need none of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class Place(NamedTuple):
    """Where a command is defined, as ``module:function`` or ``module:app``, and its line in the overview."""

    target: str
    help: str


class LazyCommand(TyperCommand):
    """Stands for a command in its group's overview, and becomes the real one when called."""

    def __init__(self, name: str, place: Place) -> None:
        super().__init__(name, help=place.help)
        self._target = place.target

    def load(self) -> Any:
        """The command itself, a ``TyperCommand`` or a ``TyperGroup``."""
        module, _, attribute = self._target.partition(":")
        defined = getattr(import_module(module), attribute)
        if isinstance(defined, typer.Typer):
            return get_command(defined)
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(self.name)(defined)
        return get_command(app)

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        return self.load().make_context(info_name, args, parent, **extra)


class LazyGroup(TyperGroup):
    """A group of lazy commands, in the order of :attr:`places`."""

    places: ClassVar[Mapping[str, Place]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for name, place in self.places.items():
            self.add_command(LazyCommand(name, place))
