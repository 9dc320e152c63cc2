"""Defines the names that templates see, and the ``set`` blocks that write some of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from noetl_dagster.errors import TemplateError
from noetl_dagster.playbook.templates.rendering import Compiled, compile_value
from noetl_dagster.playbook.templates.views import NOTHING

SCOPES = ("ctx", "iter", "step")
Stored = Callable[[str, tuple[str, ...]], Any]
"""Returns the value that ``set`` has written to a scope and path, or None."""

READ_ONLY_SCOPES = frozenset({"workload", "keychain", "input", "loop", "event", "output", "results", "job"})


class Patch(NamedTuple):
    """One value that ``set`` wrote: ``scope`` is ctx, iter or step; ``path`` the keys below it."""

    scope: str
    path: tuple[str, ...]
    value: Any

    def apply(self, target: dict[str, Any]) -> None:
        """Writes into ``target``; mappings on the way are copied, since they may belong to a result."""
        *parents, last = self.path
        for key in parents:
            inner = target.get(key)
            target[key] = dict(inner) if isinstance(inner, Mapping) else {}
            target = target[key]
        target[last] = self.value

    def as_json(self) -> dict[str, Any]:
        """Returns the patch as an event stores it."""
        return {"scope": self.scope, "path": list(self.path), "value": self.value}

    @classmethod
    def from_json(cls, written: Mapping[str, Any]) -> Patch:
        """Reads a patch from an event."""
        return cls(written["scope"], tuple(written["path"]), written["value"])


def parse_target(name: str, *, in_loop: bool) -> tuple[str, tuple[str, ...]]:
    """Splits ``ctx.a.b`` into scope and path; a bare name is ``ctx`` outside loops and ``iter`` inside.

    Raises TemplateError if the target is read-only or empty.
    """
    parts = tuple(name.split("."))
    if not all(parts):
        raise TemplateError(f"set: {name!r} is not a target; write ctx.name, iter.name or step.name")
    if len(parts) > 1 and parts[0] in SCOPES:
        return parts[0], parts[1:]
    if parts[0] in READ_ONLY_SCOPES and len(parts) > 1:
        raise TemplateError(f"set: {parts[0]} is read-only; write ctx.{'.'.join(parts[1:])} instead of {name}")
    return ("iter" if in_loop else "ctx"), parts


class CompiledSet:
    """A ``set`` block ready to be rendered."""

    __slots__ = ("_entries", "names")

    def __init__(self, entries: tuple[tuple[str, tuple[str, ...], Compiled], ...]) -> None:
        self._entries = entries
        self.names: frozenset[str] = frozenset().union(*(value.names for _, _, value in entries))

    def __bool__(self) -> bool:
        return bool(self._entries)

    def patches(self, scope: Mapping[str, Any], stored: Stored = lambda scope, path: None) -> list[Patch]:
        """Renders and admits every value in the same scope: one entry does not see what another writes.

        Args:
            stored: what stands at a target now; a value that grew from it shares its parts.

        Raises:
            TemplateError: a value cannot be rendered.
            RefusedValueError: a value has no stored form.
            ReferenceNeeded: a stored result has to be fetched first.
        """
        return [
            Patch(target, path, value.render_over(scope, stored(target, path), ".".join((target, *path))))
            for target, path, value in self._entries
        ]


def compile_set(block: Mapping[str, Any], *, in_loop: bool) -> CompiledSet:
    """Compiles a ``set`` block; raises TemplateError for a read-only target and a template that does not parse."""
    entries = ((*parse_target(name, in_loop=in_loop), compile_value(value)) for name, value in block.items())
    return CompiledSet(tuple(entries))


_NO_VALUES: Mapping[str, Any] = {}
_OLDER_OUTPUT_NAMES = frozenset({"outcome", "response", "result"})
RESULT_SUFFIX = "_result"
"""``fetch_result`` is the result of the task or step ``fetch``, if nothing else has that name."""


@dataclass(slots=True)
class IterationScope:
    """One iteration of a loop.

    Attributes:
        length: items of the loop; None if it is not known yet, as in cursor loops.
        values: what ``set`` wrote to ``iter``; shared with the code that runs the iteration.
        parent: the iteration of the loop around this one.
        outer: what ``iter`` meant in the parent playbook, if an iteration of its loop runs this one.
    """

    iterator: str
    item: Any
    index: int
    length: int | None = None
    values: dict[str, Any] = field(default_factory=dict)
    parent: IterationScope | None = None
    outer: Mapping[str, Any] | None = None

    def as_iter(self) -> dict[str, Any]:
        """Returns the value of ``iter``: everything set, the item under its name, ``index`` and ``parent``."""
        return {
            "item": self.item,
            **self.values,
            self.iterator: self.item,
            "index": self.index,
            "parent": self.parent.as_iter() if self.parent else self.outer,
        }

    def as_loop(self) -> dict[str, Any]:
        """Returns the value of ``loop`` inside an iteration. ``index`` counts from 0, like ``iter.index``."""
        return {
            "index": self.index,
            "index0": self.index,
            "index1": self.index + 1,
            "first": self.index == 0,
            "last": None if self.length is None else self.index == self.length - 1,
            "length": self.length,
            "item": self.item,
        }

    def find(self, name: str) -> Any:
        """Finds a bare name: the iterator or a value that was set, here or in an outer loop; else a marker."""
        if name == self.iterator:
            return self.item
        if name in self.values:
            return self.values[name]
        return NOTHING if self.parent is None else self.parent.find(name)


class Scope(Mapping[str, Any]):
    """All names visible at one point of an execution.

    A bare name is looked for among task locals, the iterator and what ``set`` wrote to ``iter``, ``input``,
    the names of the language itself, ``ctx``, ``workload`` and the results of steps, in this order.
    Derived scopes share their layers with the one they come from; nothing is copied.

    Args:
        workload: read-only to templates and to Python code.
        ctx: the execution's context; live, so that what ``set`` writes is seen at once.
        steps: step name to result; may be lazy, a missing one raises ``KeyError``. It may also have ``previous``, the
            result of the step before, and ``of_task``, which finds the result of a task in an earlier step.
        own: names of the language that a playbook may use for its own: ``partition``, ``asset``.
    """

    __slots__ = ("_fallbacks", "_keychain", "_locals", "_own", "_steps", "ctx", "execution_id", "input", "iteration",
                 "state", "step_values", "workload")  # fmt: skip

    def __init__(
        self,
        *,
        execution_id: int,
        workload: Mapping[str, Any],
        ctx: dict[str, Any],
        steps: Mapping[str, Any],
        own: Mapping[str, Any] = _NO_VALUES,
    ) -> None:
        self.execution_id = execution_id
        self.workload = workload
        self.ctx = ctx
        self.iteration: IterationScope | None = None
        self.step_values: dict[str, Any] = {}
        self._steps = steps
        self._keychain: Mapping[str, Any] | None = None
        self._own = own
        self._fallbacks: Mapping[str, Any] = _NO_VALUES
        self.state: Mapping[str, Any] | None = None
        self.input: Mapping[str, Any] = _NO_VALUES
        self._locals: tuple[Mapping[str, Any], ...] = ()

    def with_input(self, input: Mapping[str, Any]) -> Self:
        """Adds input; of equal keys the later one wins."""
        return self._derive(input={**self.input, **input})

    def with_iteration(
        self,
        iterator: str,
        item: Any,
        index: int,
        length: int | None,
        values: dict[str, Any] | None = None,
        outer: Mapping[str, Any] | None = None,
    ) -> Self:
        """Enters an iteration, inside the present one if there is one."""
        own = {} if values is None else values
        turn = IterationScope(iterator, item, index, length, own, self.iteration, outer)
        return self._derive(iteration=turn)

    def with_locals(self, values: Mapping[str, Any]) -> Self:
        """Adds names above all others: task results, ``output``, ``error``, ``event``, ``loop`` and so on."""
        return self._derive(_locals=(values, *self._locals))

    def with_fallbacks(self, values: Mapping[str, Any]) -> Self:
        """Adds names that come after all but the results of steps."""
        return self._derive(_fallbacks=values)

    def with_keychain(self, keychain: Mapping[str, Any]) -> Self:
        """Makes ``keychain`` visible, for the fields of a tool."""
        return self._derive(_keychain=keychain)

    def with_state(self, state: Mapping[str, Any]) -> Self:
        """Makes ``state`` visible, for a step that keeps a watermark."""
        return self._derive(state=state)

    def with_step_values(self, values: dict[str, Any]) -> Self:
        """Uses ``values`` behind ``step.x``."""
        return self._derive(step_values=values)

    def _derive(self, **changes: Any) -> Self:
        derived = object.__new__(type(self))  # written out: every iteration makes a handful of these
        derived.execution_id = self.execution_id
        derived.workload = self.workload
        derived.ctx = self.ctx
        derived.iteration = self.iteration
        derived.step_values = self.step_values
        derived._steps = self._steps
        derived._keychain = self._keychain
        derived.input = self.input
        derived._locals = self._locals
        derived._own = self._own
        derived._fallbacks = self._fallbacks
        derived.state = self.state
        for name, value in changes.items():
            setattr(derived, name, value)
        return derived

    def stored(self, scope: str, path: tuple[str, ...]) -> Any:
        """Returns the value that ``set`` has written to ``ctx``, ``iter`` or ``step`` at a path, or None."""
        value: Any = self.step_values
        if scope == "ctx":
            value = self.ctx
        elif scope == "iter" and self.iteration is not None:
            value = self.iteration.values
        for key in path:
            value = value.get(key) if value.__class__ is dict or isinstance(value, Mapping) else None
        return value

    @property
    def later_steps(self) -> Collection[str]:
        """Steps of the playbook that have no result yet, where the results know of them; for error messages."""
        later: Collection[str] = getattr(self._steps, "later", ())
        return later

    @property
    def previous(self) -> Any:
        """The result of the step before, None if there is none."""
        return getattr(self._steps, "previous", None)

    def __getitem__(self, name: str) -> Any:
        for layer in self._locals:
            if name in layer:
                return layer[name]
        if self.iteration is not None:
            value = self.iteration.find(name)
            if value is not NOTHING:
                return value
        if name in self.input:
            return self.input[name]
        value = self._own_name(name)
        if value is not NOTHING:
            return value
        if name in self.ctx:
            return self.ctx[name]
        if name in self.workload:
            return self.workload[name]
        if name in self._fallbacks:
            return self._fallbacks[name]
        try:
            return self._steps[name]
        except KeyError:
            pass
        return self._last_resort(name)

    def _own_name(self, name: str) -> Any:
        """Finds the names of the language itself, which nothing in workload or ctx hides."""
        match name:
            case "workload":
                return self.workload
            case "ctx" | "vars":
                return self.ctx
            case "execution_id":
                return str(self.execution_id)
            case "input":
                return self.input
            case "keychain" if self._keychain is not None:
                return self._keychain
            case "state" if self.state is not None:
                return self.state
        if self.iteration is not None:
            match name:
                case "iter":
                    return self.iteration.as_iter()
                case "loop":
                    return self.iteration.as_loop()
                case "_index" | "loop_index":
                    return self.iteration.index
        return NOTHING

    def _last_resort(self, name: str) -> Any:
        """Names of the language that a playbook may well use for its own: these come after all others."""
        match name:
            case "job":
                text = str(self.execution_id)
                return {"id": text, "uuid": text, "execution_id": text}
            case "step":
                return self.step_values
            case "args":  # the older word for input; arcs hand their own over through ctx
                return {**self.ctx, **self.input}
        if name in self._own:
            return self._own[name]
        if name in _OLDER_OUTPUT_NAMES:
            for layer in self._locals:
                if "output" in layer:
                    return layer["output"]
        value = None
        if name == "result":
            value = self.previous
        elif name.endswith(RESULT_SUFFIX):
            value = self._result_of(name.removesuffix(RESULT_SUFFIX))
        if value is None:
            raise KeyError(name)
        return value

    def _result_of(self, name: str) -> Any:
        """Finds the result of a task of this step, of a step, or of a task of an earlier step; else None."""
        for layer in self._locals:
            results = layer.get("results")
            if isinstance(results, Mapping) and name in results:
                return results[name]
        if name in self._steps:
            return self._steps[name]
        of_task = getattr(self._steps, "of_task", None)
        return None if of_task is None else of_task(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.known_names())

    def __len__(self) -> int:
        return len(self.known_names())

    def known_names(self) -> list[str]:
        """Returns every usable name, sorted, for error messages and Python's ``context``."""
        names = {"workload", "ctx", "execution_id", "input", "job", "step", *self._own}
        if self._keychain is not None:
            names.add("keychain")
        if self.state is not None:
            names.add("state")
        frame = self.iteration
        if frame is not None:
            names.update(("iter", "loop", "_index"))
        while frame is not None:
            names.update((frame.iterator, *frame.values))
            frame = frame.parent
        names.update(self.input, self.ctx, self.workload, self._fallbacks, self._steps, *self._locals)
        return sorted(map(str, names))
