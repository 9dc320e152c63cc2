"""Rewrites the older words of each part of a playbook in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from functools import wraps
from typing import Concatenate

from pydantic import BaseModel
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from noetl_dagster.errors import Place, Problem, ProblemKind
from noetl_dagster.playbook import models, tool_kinds
from noetl_dagster.playbook.fields import declarations
from noetl_dagster.playbook.templates.scope import SCOPES

Pair = tuple[Node, Node]
_UNKNOWN = tool_kinds.ToolKind(fields=())


class Entries:
    """A mapping node by its keys, in the order of the file."""

    def __init__(self, node: MappingNode) -> None:
        self.node = node

    def __contains__(self, key: str) -> bool:
        return any(known.value == key for known, _ in self.node.value)

    def __iter__(self) -> Iterator[str]:
        return iter([key.value for key, _ in self.node.value if isinstance(key, ScalarNode)])

    def value(self, key: str) -> Node | None:
        """Returns the node at a key, None if the key is missing."""
        return next((value for known, value in self.node.value if known.value == key), None)

    @property
    def kind(self) -> str | None:
        """``kind``, its own or that of what ``<<`` merges in."""
        value, merged = self.value("kind"), self.inner("<<")
        if isinstance(value, ScalarNode) and value.value:
            return str(value.value)
        return None if merged is None else merged.kind

    def inner(self, key: str) -> Entries | None:
        """Returns the mapping below a key; None if there is none."""
        return entries(self.value(key))

    def items(self, key: str) -> list[Node]:
        """Returns the items of the list below a key; none if there is no list."""
        value = self.value(key)
        return value.value if isinstance(value, SequenceNode) else []

    def position(self, key: str) -> int:
        """Returns the index of a key, which must exist."""
        return next(place for place, (known, _) in enumerate(self.node.value) if known.value == key)

    def rename(self, key: str, name: str) -> None:
        """Renames a key."""
        self.node.value[self.position(key)][0].value = name

    def replace(self, key: str, value: Node) -> None:
        """Replaces the node at a key."""
        position = self.position(key)
        self.node.value[position] = (self.node.value[position][0], value)

    def take(self, key: str) -> Pair:
        """Takes an entry out, with its comments."""
        pair: Pair = self.node.value.pop(self.position(key))
        return pair

    def add(self, pair: Pair, position: int | None = None) -> None:
        """Puts an entry in, at the end by default."""
        self.node.value.insert(len(self.node.value) if position is None else position, pair)


def entries(node: Node | None) -> Entries | None:
    """Returns a mapping node by its keys; None for any other node."""
    return Entries(node) if isinstance(node, MappingNode) else None


def scalar(text: str, like: Node) -> ScalarNode:
    """Makes a plain text at the place of another node."""
    return ScalarNode("tag:yaml.org,2002:str", text, like.start_mark, like.end_mark)


def mapping(pairs: Iterable[Pair], like: Node, *, flow: bool | None) -> MappingNode:
    """Makes a mapping at the place of another node."""
    return MappingNode("tag:yaml.org,2002:map", list(pairs), like.start_mark, like.end_mark, flow_style=bool(flow))


def sequence(items: Iterable[Node], like: Node, *, flow: bool | None) -> SequenceNode:
    """Makes a list at the place of another node."""
    return SequenceNode("tag:yaml.org,2002:seq", list(items), like.start_mark, like.end_mark, flow_style=bool(flow))


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
        self._unlabelled_nodes: dict[int, Node] = {}
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
                self._spell(entry, tool_kinds.DESCRIPTION)
                self._tool(entry)
                self._sink(entry.value("sink"))

    @_once
    def _step(self, step: Entries) -> None:
        self._spell(step, tool_kinds.INPUT, tool_kinds.OUTPUT, tool_kinds.DESCRIPTION)
        self._sets(step)
        self._tool(step)
        self._spec(step.value("spec"))
        self._loop(step.value("loop"))
        self._next(step)
        self._retry(step.value("retry"))
        self._sink(step.value("sink"))

    # -- tools

    def _tool(self, step: Entries) -> None:
        """Rewrites ``tool`` as a name with fields beside it, under a label, or in today's form."""
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
        """Rewrites ``tool: http`` with the tool's fields beside it as one mapping."""
        fields = tool_kinds.TOOL_KINDS.get(name.value, _UNKNOWN).beside_step
        pairs = [step.take(key) for key in list(step) if key in fields]
        tool = mapping([(scalar("kind", name), name), *pairs], name, flow=step.node.flow_style)
        step.replace("tool", tool)
        return tool

    def _unlabelled(self, node: Node) -> Node:
        """Rewrites ``{label: {kind, ...}}`` as ``{name: label, kind, ...}``; several labels give a list."""
        if (known := self._unlabelled_nodes.get(id(node))) is not None:  # an alias repeats it
            return known
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
            task.add((scalar("name", label_node), label_node), 0)
            named.append(inner)
        found = named[0] if len(named) == 1 else sequence(named, node, flow=labelled.node.flow_style)
        self._unlabelled_nodes[id(node)] = found
        return found

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
        self._spell(task, tool_kinds.DESCRIPTION, tool_kinds.OUTPUT, tool_kinds.AUTH, *fields)
        if not isinstance(task.value("args"), SequenceNode):
            self._spell(
                task,
                (*tool_kinds.INPUT, "payload", "workload") if task.kind == "playbook" else tool_kinds.INPUT,
            )
        self._sets(task)
        self._spec(task.value("spec"))
        self._retry(task.value("retry"))
        self._sink(task.value("sink"))

    def _lift(self, task: Entries) -> None:
        """Fields of the tool below ``spec``, or ``runtime`` of a container, beside ``kind``."""
        for key, movable in _kind_of(task).liftable.items():
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
        self._spell(spec, tool_kinds.TIMEOUT)
        self._value(spec, "loop_mode", models.LOOP_MODES)
        self._spell_fields(spec.inner("fanout"), models.FanoutSpec)
        policy = spec.value("policy")
        if isinstance(policy, SequenceNode):
            rules = scalar("rules", policy)
            spec.replace("policy", mapping([(rules, policy)], policy, flow=policy.flow_style))
        written = spec.inner("policy")
        for node in [] if written is None else written.items("rules"):
            self._rule(node)

    @_once
    def _rule(self, rule: Entries) -> None:
        self._spell(rule, tool_kinds.WHEN, tool_kinds.DESCRIPTION)
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
        self._spell_fields(action, models.PolicyAction)
        self._sets(action)

    # -- loops, routes, and the oldest blocks

    @_once
    def _loop(self, loop: Entries) -> None:
        self._spell(loop, tool_kinds.LOOP_IN, tool_kinds.LOOP_ITERATOR, tool_kinds.DESCRIPTION)
        self._spell_fields(loop.inner("cursor"), models.CursorSpec)
        self._gather_settings(loop)
        spec = loop.inner("spec")
        if spec is not None:
            self._spell_fields(spec, models.Loop)
            self._spec(spec.node)

    def _gather_settings(self, loop: Entries) -> None:
        """Settings beside ``in`` and ``iterator`` below ``spec``, where those of the same name go first."""
        beside = [key for key in loop if key in (*tool_kinds.LOOP_SETTINGS, *tool_kinds.MAX_IN_FLIGHT)]
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
        """Rewrites the older list: exclusive if it has conditions, else all of its steps."""
        pairs: list[Pair] = [(scalar("arcs", arcs), arcs)]
        conditional = [
            word in Entries(arc) for arc in arcs.value if isinstance(arc, MappingNode) for word in tool_kinds.WHEN
        ]
        if len(arcs.value) > 1 and not any(conditional):
            mode = (scalar("mode", arcs), scalar("inclusive", arcs))
            pairs.insert(0, (scalar("spec", arcs), mapping([mode], arcs, flow=True)))
        return mapping(pairs, arcs, flow=arcs.flow_style)

    @_once
    def _arc(self, arc: Entries) -> None:
        self._spell(arc, tool_kinds.WHEN, tool_kinds.INPUT, tool_kinds.DESCRIPTION)
        self._sets(arc)

    def _retry(self, retry: Node | None) -> None:
        for node in retry.value if isinstance(retry, SequenceNode) else [retry]:
            self._retry_rule(node)

    @_once
    def _retry_rule(self, rule: Entries) -> None:
        self._spell(rule, ("when", "retry_when"))
        then = rule.inner("then") or rule
        self._spell_fields(then, models.RetryRule)
        self._sink(then.value("sink"))
        self._spell_fields(then.inner("next_call"), models.NextCall)

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
        self._spell_fields(sink, models.Sink)
        self._spell(sink, tool_kinds.INPUT, ("tool", "kind"))

    # -- single words

    def _spell_fields(self, owner: Entries | None, model: type[BaseModel]) -> None:
        for field in declarations(model) if owner is not None else ():
            assert owner is not None
            self._spell(owner, field.spellings)
            self._value(owner, field.name, field.words)

    def _spell(self, owner: Entries, *spellings: tuple[str, ...]) -> None:
        """Replaces any word of a tuple by the tuple's first."""
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
        """Rewrites ``set_ctx``, ``set_iter`` and ``vars`` as ``set``, with their scope in each name."""
        present = [key for key in owner if key in tool_kinds.SET_BLOCKS and owner.inner(key) is not None]
        older = [key for key in present if key != "set"]
        if not older:
            return
        for key in older:
            self._scoped(owner.value(key), tool_kinds.SET_BLOCKS[key] or "ctx")
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


def _kind_of(task: Entries) -> tool_kinds.ToolKind:
    return tool_kinds.TOOL_KINDS.get(task.kind or "", _UNKNOWN)
