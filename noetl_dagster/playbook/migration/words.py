"""Rewrites the older words of each part of a playbook in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import wraps
from typing import Concatenate

from pydantic import BaseModel
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from noetl_dagster.errors import Place, Problem, ProblemKind
from noetl_dagster.playbook.dialects.spelling import (
    DESCRIPTION,
    INPUT,
    LOOP_IN,
    LOOP_ITERATOR,
    LOOP_SETTINGS,
    MAX_IN_FLIGHT,
    OUTPUT,
    SET_BLOCKS,
    WHEN,
    liftable,
)
from noetl_dagster.playbook.fields import declarations
from noetl_dagster.playbook.migration.yaml_text import (
    Entries,
    Pair,
    entries,
    mapping,
    move_comment,
    scalar,
    sequence,
)
from noetl_dagster.playbook.models import (
    LOOP_MODES,
    CursorSpec,
    FanoutSpec,
    Loop,
    NextCall,
    PolicyAction,
    RetryRule,
    Sink,
)
from noetl_dagster.playbook.templates.scope import SCOPES
from noetl_dagster.playbook.tool_kinds import AUTH, TIMEOUT, TOOL_KINDS, ToolKind

_UNKNOWN = ToolKind(fields=())


def _once(
    rewrite: Callable[Concatenate[Words, Entries, ...], None],
) -> Callable[Concatenate[Words, Node | None, ...], None]:
    """Rewrites a mapping that was not seen before: one that an alias repeats is rewritten once."""

    @wraps(rewrite)
    def once(self: Words, node: Node | None, *arguments: str) -> None:
        if isinstance(node, MappingNode) and id(node) not in self._seen:
            self._seen.add(id(node))
            rewrite(self, Entries(node), *arguments)

    return once


class Words:
    """Rewrites a playbook; the caller compares its meaning. ``problems`` holds the older words that stay, and why."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._seen: set[int] = set()
        self.problems: list[Problem] = []

    def rewrite(self, root: Node) -> None:
        """Rewrites a playbook's root node in place."""
        playbook = entries(root)
        if playbook is None:
            return
        for step in playbook.items("workflow"):
            self._step(step)
        named = playbook.inner("workbook")
        if named is not None and list(named) == ["tasks"]:
            named = named.inner("tasks")
        for node in playbook.items("workbook") if named is None else [named.value(name) for name in named]:
            entry = entries(node)
            if entry is None or "tool" not in entry:
                self._task(node)
            else:
                self._spell(entry, DESCRIPTION)
                self._tool(entry)
                self._sink(entry.value("sink"))

    @_once
    def _step(self, step: Entries) -> None:
        self._spell(step, INPUT, OUTPUT, DESCRIPTION)
        self._sets(step)
        self._tool(step)
        self._spec(step.value("spec"))
        self._loop(step.value("loop"))
        self._next(step)
        self._retry(step.value("retry"))
        self._sink(step.value("sink"))

    # -- tools

    def _tool(self, step: Entries) -> None:
        """``tool`` as a name with its fields beside it, under a label, or as it is written today."""
        tool = step.value("tool")
        if isinstance(tool, ScalarNode):
            tool = self._nested(step, tool)
        if isinstance(tool, MappingNode):
            found = self._unlabelled(tool)
            if found is not tool:
                step.replace("tool", found)
            for task in found.value if isinstance(found, SequenceNode) else [found]:
                self._task(task)
        elif isinstance(tool, SequenceNode):
            items: list[Node] = []
            for node in tool.value:
                task = self._unlabelled(node)
                items += task.value if isinstance(task, SequenceNode) else [task]
            tool.value[:] = items
            for item in items:
                self._task(item)

    def _nested(self, step: Entries, name: ScalarNode) -> MappingNode:
        """``tool: http`` with the tool's fields beside it, as one mapping."""
        fields = TOOL_KINDS.get(name.value, _UNKNOWN).beside_step
        pairs = [step.take(key) for key in list(step) if key in fields]
        tool = mapping([(scalar("kind", name), name), *pairs], name, flow=step.node.flow_style)
        step.replace("tool", tool)
        return tool

    def _unlabelled(self, node: Node) -> Node:
        """``{label: {kind, ...}}`` as ``{name: label, kind, ...}``; several labels give a list."""
        labelled = entries(node)
        if labelled is None or labelled.kind is not None or not list(labelled):
            return node
        tasks = [Entries(value) for _, value in labelled.node.value if isinstance(value, MappingNode)]
        if len(tasks) < len(labelled.node.value) or not all("kind" in task for task in tasks):
            return node
        for task in tasks:
            self._lift(task)
        if any(not self._can_be_named(task) for task in tasks):
            return node
        named: list[Node] = []
        for label_node, inner in list(labelled.node.value):
            task = Entries(inner)
            kind = _kind_of(task)
            if "name" in task and kind.name_fills is not None:
                task.rename("name", kind.name_fills)
            name = scalar("name", label_node)
            move_comment(label_node, name)
            move_comment(inner, label_node)
            task.add((name, label_node), 0)
            named.append(inner)
        return named[0] if len(named) == 1 else sequence(named, node, flow=labelled.node.flow_style)

    def _can_be_named(self, task: Entries) -> bool:
        """Reports whether the task has room for its label: its own ``name`` may say what it works on."""
        fills = _kind_of(task).name_fills
        if "name" not in task or (fills not in (None, "name") and fills not in task):
            return True
        self._stays(task.node, "a labelled task with a 'name' of its own stays labelled")
        return False

    @_once
    def _task(self, task: Entries) -> None:
        self._lift(task)
        fields = [words for words in _kind_of(task).fields if words[0] != "args"]
        self._spell(task, DESCRIPTION, OUTPUT, AUTH, *fields)
        if not isinstance(task.value("args"), SequenceNode):
            self._spell(task, (*INPUT, "payload", "workload") if task.kind == "playbook" else INPUT)
        self._sets(task)
        self._spec(task.value("spec"))
        self._retry(task.value("retry"))
        self._sink(task.value("sink"))

    def _lift(self, task: Entries) -> None:
        """Fields of the tool below ``spec``, or ``runtime`` of a container, beside ``kind``."""
        for key, movable in liftable(_kind_of(task)).items():
            inner = task.inner(key)
            moved = [] if inner is None else [name for name in inner if name in movable]
            if inner is None or not moved:
                continue
            place = task.position(key)
            for offset, name in enumerate(moved):
                task.add(inner.take(name), place + offset)
            if not list(inner):
                task.take(key)

    # -- specs and policies

    @_once
    def _spec(self, spec: Entries) -> None:
        self._spell(spec, TIMEOUT)
        self._value(spec, "loop_mode", LOOP_MODES)
        self._spell_fields(spec.inner("fanout"), FanoutSpec)
        policy = spec.value("policy")
        if isinstance(policy, SequenceNode):
            rules = scalar("rules", policy)
            spec.replace("policy", mapping([(rules, policy)], policy, flow=policy.flow_style))
        written = spec.inner("policy")
        for node in [] if written is None else written.items("rules"):
            self._rule(node)

    @_once
    def _rule(self, rule: Entries) -> None:
        self._spell(rule, WHEN, DESCRIPTION)
        otherwise = rule.inner("else")
        if otherwise is not None and "then" not in otherwise:
            node = otherwise.node
            rule.replace("else", mapping([(scalar("then", node), node)], node, flow=node.flow_style))
            self._action(node)
        elif otherwise is not None:
            self._action(otherwise.value("then"))
        self._action(rule.value("then"))

    @_once
    def _action(self, action: Entries) -> None:
        self._spell_fields(action, PolicyAction)
        self._sets(action)

    # -- loops, routes, and the oldest blocks

    @_once
    def _loop(self, loop: Entries) -> None:
        self._spell(loop, LOOP_IN, LOOP_ITERATOR, DESCRIPTION)
        self._spell_fields(loop.inner("cursor"), CursorSpec)
        self._gather_settings(loop)
        spec = loop.inner("spec")
        if spec is not None:
            self._spell_fields(spec, Loop)
            self._spec(spec.node)

    def _gather_settings(self, loop: Entries) -> None:
        """Settings beside ``in`` and ``iterator`` below ``spec``, where those of the same name go first."""
        beside = [key for key in loop if key in (*LOOP_SETTINGS, *MAX_IN_FLIGHT)]
        spec = loop.inner("spec")
        if spec is None and beside and "spec" not in loop:
            place = loop.position(beside[0])
            pairs = [loop.take(key) for key in beside]
            is_short = all(isinstance(value, ScalarNode) for _, value in pairs)
            settings = mapping(pairs, pairs[0][0], flow=is_short or loop.node.flow_style)
            loop.add((scalar("spec", pairs[0][0]), settings), place)
        elif spec is not None:
            for key in beside:
                pair = loop.take(key)
                if key not in spec:
                    spec.add(pair)

    def _next(self, step: Entries) -> None:
        value = step.value("next")
        if isinstance(value, SequenceNode) and any(isinstance(arc, MappingNode) for arc in value.value):
            step.replace("next", self._router(value))
        elif isinstance(value, MappingNode):
            router = Entries(value)
            if "step" in router:
                self._arc(value)
            elif "mode" in router and "spec" not in router:
                pair = router.take("mode")
                spec = mapping([pair], pair[0], flow=True)
                router.add((scalar("spec", pair[0]), spec), 0)
        written = step.inner("next")
        for arc in [] if written is None else written.items("arcs"):
            self._arc(arc)

    def _router(self, arcs: SequenceNode) -> MappingNode:
        """The older list: exclusive where it has conditions; all of several steps without any."""
        pairs: list[Pair] = [(scalar("arcs", arcs), arcs)]
        conditional = [
            word in Entries(arc) for arc in arcs.value if isinstance(arc, MappingNode) for word in WHEN
        ]
        if len(arcs.value) > 1 and not any(conditional):
            mode = (scalar("mode", arcs), scalar("inclusive", arcs))
            pairs.insert(0, (scalar("spec", arcs), mapping([mode], arcs, flow=True)))
        router = mapping(pairs, arcs, flow=arcs.flow_style)
        move_comment(arcs, router)
        return router

    @_once
    def _arc(self, arc: Entries) -> None:
        self._spell(arc, WHEN, INPUT, DESCRIPTION)
        self._sets(arc)

    def _retry(self, retry: Node | None) -> None:
        for node in retry.value if isinstance(retry, SequenceNode) else [retry]:
            self._retry_rule(node)

    @_once
    def _retry_rule(self, rule: Entries) -> None:
        self._spell(rule, ("when", "retry_when"))
        then = rule.inner("then") or rule
        self._spell_fields(then, RetryRule)
        self._sink(then.value("sink"))
        self._spell_fields(then.inner("next_call"), NextCall)

    @_once
    def _sink(self, sink: Entries) -> None:
        tool = sink.inner("tool")
        if tool is not None and not any(key in sink for key in tool if key != "kind"):
            place = sink.position("tool")
            kind = tool.value("kind")
            for key in [key for key in tool if key != "kind"]:
                place += 1
                sink.add(tool.take(key), place)
            sink.replace("tool", kind if kind is not None else scalar("postgres", tool.node))
        self._spell_fields(sink, Sink)
        self._spell(sink, INPUT, ("tool", "kind"))

    # -- single words

    def _spell_fields(self, owner: Entries | None, model: type[BaseModel]) -> None:
        """Rewrites older spellings of a model's fields, and older words of their values."""
        for field in declarations(model) if owner is not None else ():
            assert owner is not None
            self._spell(owner, field.spellings)
            self._value(owner, field.name, field.words)

    def _spell(self, owner: Entries, *spellings: tuple[str, ...]) -> None:
        """The first word of each tuple for whichever of its words stands there."""
        for words in spellings:
            present = [word for word in words if word in owner]
            if len(present) > 1:
                both = " and ".join(map(repr, present))
                self._stays(owner.node, f"{both} stay beside each other: they mean the same and are merged")
            elif present and present[0] != words[0]:
                owner.rename(present[0], words[0])

    def _value(self, owner: Entries, key: str, words: Mapping[str, StrEnum]) -> None:
        value = owner.value(key)
        if isinstance(value, ScalarNode):
            word = words.get(value.value.strip().lower())
            value.value = value.value if word is None else word.value

    def _sets(self, owner: Entries) -> None:
        """``set_ctx``, ``set_iter`` and ``vars`` as ``set``, whose names say where they are written."""
        present = [key for key in owner if key in SET_BLOCKS and owner.inner(key) is not None]
        older = [key for key in present if key != "set"]
        if not older:
            return
        for key in older:
            self._scoped(owner.value(key), SET_BLOCKS[key] or "ctx")
        names = [name for key in present for name in owner.inner(key) or ()]
        if len(set(names)) < len(names):
            self._stays(owner.node, f"{' and '.join(map(repr, present))} stay: they set the same name")
            return
        first = present[0]
        for key in present[1:]:
            kept, block = owner.inner(first), owner.inner(key)
            assert kept is not None
            assert block is not None
            if not block.node.flow_style:
                kept.node.flow_style = False
            move_comment(block.node, kept.node)
            for name in list(block):
                kept.add(block.take(name))
            owner.take(key)
        if first != "set":
            owner.rename(first, "set")

    @_once
    def _scoped(self, block: Entries, scope: str) -> None:
        for name in list(block):
            is_scope = name in SCOPES and isinstance(block.value(name), MappingNode)
            if not is_scope and not (name.partition(".")[0] in SCOPES and "." in name):
                block.rename(name, f"{scope}.{name}")

    def _stays(self, node: Node, message: str) -> None:
        place = Place(self._file, node.start_mark.line + 1, node.start_mark.column + 1)
        self.problems.append(Problem(place, message, "warning", ProblemKind.CONFLICTING_FIELDS))


def _kind_of(task: Entries) -> ToolKind:
    return TOOL_KINDS.get(task.kind or "", _UNKNOWN)
