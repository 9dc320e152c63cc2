"""Declares the fields of the canonical models: name, spellings, type and words, each in one place.

The reader of blocks and the JSON Schema both work from these declarations. Pydantic's own aliases cannot carry them:
two spellings of one field in one mapping are an error or are merged, a setting may be a template that is rendered
later, and every message names a place in the document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import (
    BaseModel,
    BeforeValidator,
    PlainSerializer,
    SerializationInfo,
    ValidationInfo,
)

from noetl_dagster.errors import Place


class Model(BaseModel, frozen=True, extra="forbid", arbitrary_types_allowed=True):
    """A frozen model that accepts no other fields."""


class Spelled:
    """Further spellings of a field, and further words for the values of an enum.

    Args:
        names: the other spellings.
        words: words and the values that they stand for.
    """

    def __init__(self, *names: str, words: Mapping[str, Any] | None = None) -> None:
        self.names = names
        self.words = words or {}


def _stored_place(place: Place | None, info: SerializationInfo) -> Any:
    if place is None or info.context is None:
        return place
    return [place.line, place.column]


def _loaded_place(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, list) and len(value) == 2 and info.context:
        return Place(info.context["file"], *value)
    return value


StoredPlace = Annotated[Place | None, PlainSerializer(_stored_place), BeforeValidator(_loaded_place)]
"""A place that is stored without the name of its file, which the context of the validation supplies."""

Seconds = Annotated[float, "seconds"]
"""A duration, which may be written as ``30s``, ``5m`` or ``1h``."""


@dataclass(frozen=True, slots=True)
class Declaration:
    """One field of a model.

    Attributes:
        spellings: the words for it, the canonical one first.
        type: its type without None; ``Seconds`` for durations.
        words: further words for the values of an enum.
        default: the value of a field that is not required.
    """

    name: str
    spellings: tuple[str, ...]
    type: Any
    words: Mapping[str, Any]
    default: Any
    description: str


@cache
def declarations(model: type[BaseModel]) -> tuple[Declaration, ...]:
    """Returns the declarations of a model's fields, in their order."""
    fields = []
    for name, info in model.model_fields.items():
        type_: Any = info.annotation
        metadata = [*info.metadata]
        if get_origin(type_) in (Union, UnionType):
            [type_, *_] = [one for one in get_args(type_) if one is not NoneType]
        if get_origin(type_) is Annotated:
            metadata += get_args(type_)[1:]
        spelled = next((one for one in metadata if isinstance(one, Spelled)), Spelled())
        type_, about = Seconds if "seconds" in metadata else type_, info.description or ""
        fields.append(Declaration(name, (name, *spelled.names), type_, spelled.words, info.default, about))
    return tuple(fields)


def spellings_of(model: type[BaseModel], name: str) -> tuple[str, ...]:
    """Returns the words for one field of a model."""
    return next(field.spellings for field in declarations(model) if field.name == name)
