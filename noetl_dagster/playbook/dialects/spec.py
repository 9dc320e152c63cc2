"""``spec`` blocks: layered from the executor inward, then read for a task or a step."""

from __future__ import annotations

import re
from typing import Any

from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.pod import read_pod
from noetl_dagster.playbook.dialects.routing import read_on_error, read_rules
from noetl_dagster.playbook.document import Document
from noetl_dagster.playbook.models import FanoutSpec, PolicyRule, ResultSpec, StepSpec, TaskSpec
from noetl_dagster.playbook.tool_kinds import LOOP_SETTINGS, MAX_IN_FLIGHT, OUTPUT, SPEC_WORDS, TIMEOUT
from noetl_dagster.playbook.wording import is_template
from noetl_dagster.settings import StoreTier

SIZE_THRESHOLD = "size_threshold"
STEP_SPEC = (
    *("loop_mode", "fanout", "policy", "timeout", "dispatch", "max_attempts", "priority", "weight", "pool"),
    *("kubernetes", "strict_ctx", "allow_partial", "fail_fast", "result", "retry", "on_error"),
)
_STEP_ONLY = {*STEP_SPEC, *LOOP_SETTINGS, *MAX_IN_FLIGHT, "admit"} - {"policy", "timeout", "result", "on_error"}
"""Keys of a step's, a loop's or the executor's spec that say nothing to its tasks."""

TASK_SPEC = (*SPEC_WORDS, "on_error")
"""Keys of a task's spec, which outer specs may have too."""

_KEEPING = frozenset({"output_select", "store", "select", "name", "ttl"})
_INDEX = re.compile(r"\[(-?\d+)\]")


def layered_block(own: Block, what: str, *outer: dict[str, Any]) -> Block:
    """Returns a block of own values over those of outer specs, that of all steps outermost."""
    inner = {key for layer in (*outer[1:], own.values) for key in layer}
    block = Block(own.reading, layered(own.document, *outer, own.values), what, own.place)
    block.outer = {key: where for key, where in own.reading.outer.items() if key not in inner}
    return block


def layered(document: Document, *layers: dict[str, Any]) -> dict[str, Any]:
    """Lays specs over each other, outermost first: mappings merge, anything else is replaced."""
    holders: dict[str, dict[str, Any]] = {}
    merged: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for key, value in layer.items():
            below = merged.pop(key, None) or (holders[key][key] if key in holders else None)
            holders[key] = layer
            if isinstance(below, dict) and isinstance(value, dict):
                merged[key] = layered(document, below, value)
    values = document.gathered((layer, key, key) for key, layer in holders.items())
    values.update(merged)
    return values


def outer_task_spec(document: Document, spec: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of an outer spec (executor, step, loop) that applies to the tasks inside."""
    return document.gathered((spec, key, key) for key in spec if key not in _STEP_ONLY)


def read_task_spec(own: Block | None, outer: tuple[dict[str, Any], ...], fallback: Block) -> TaskSpec:
    """Reads the effective spec of a task.

    Args:
        own: the task's own ``spec``.
        outer: specs of executor, step and loop, outermost first.
        fallback: the task itself, named in messages about inherited values.
    """
    spec_block = own or Block(fallback.reading, {}, fallback.what, fallback.place)
    spec_block.drop(*TASK_SPEC)
    spec_block.close(sorted(TASK_SPEC), remedies=dict.fromkeys(_STEP_ONLY, "write it in the spec of the step"))
    layers = (*outer, spec_block.values)
    rules, level = read_rules(spec_block), len(outer)
    if rules is None:
        rules, level = _inherited_rules(outer, fallback)
    spec = layered_block(spec_block, f"{fallback.what}, spec", *outer)
    spec.drop("policy")
    on_error = read_on_error(spec)
    if on_error:
        # an else rule decides about all that an outer level says
        last = rules[-1:] if rules and rules[-1].when is None else ()
        if not last or any("on_error" in layer for layer in layers[level:]):
            rules = (*rules[: len(rules) - len(last)], *on_error, *last)
    timeout = read_timeout(spec)
    block = spec.child("result", expected="result must be a mapping, for example {store: minio}")
    result = None if block is None else _keeping(block)
    options = spec.take_rest()
    read = spec.build(TaskSpec, timeout=timeout, policy=rules, result=result, options=options)
    return read or TaskSpec()


def _inherited_rules(outer: tuple[dict[str, Any], ...], owner: Block) -> tuple[tuple[PolicyRule, ...], int]:
    """Returns the rules of the innermost outer spec that has any, and the index of that spec."""
    for level, spec in reversed([*enumerate(outer)]):
        policy = spec.get("policy")
        if isinstance(policy, list) or (isinstance(policy, dict) and "rules" in policy):
            place = owner.document.place(spec, "policy")
            return read_rules(Block(owner.reading, spec, f"{owner.what}, inherited spec", place)) or (), level
    return (), 0


def read_timeout(spec: Block, *names: str) -> float | None:
    """Reads seconds; ``{connect, read}`` counts as their sum."""
    names = names or TIMEOUT
    if not isinstance(spec.take(*names), dict):
        return spec.seconds(*names)
    parts = spec.child(*names)
    assert parts is not None
    limits = [parts.seconds(name) for name in ("connect", "read", "write", "pool", "total")]
    parts.close()
    return sum(part for part in limits if part is not None) or None


def read_keeping(block: Block, result: ResultSpec) -> tuple[Any, ResultSpec]:
    """Reads ``output`` and ``output_select``: the template that reshapes a result, and how the result is stored.

    An ``output`` that only says what to select and where to store leaves the result as it is. What either says
    goes before ``result``, which comes from the spec.
    """
    select, threshold = _selection(block, "output_select")
    specs = [ResultSpec(select=select, threshold=threshold)]
    output = block.take(*OUTPUT)
    if _has_only_storage_fields(output):
        keeping = block.child(*OUTPUT)
        specs += [] if keeping is None else [_keeping(keeping)]
        output = None
    return output, merged_results(*specs, result)


def merged_results(*specs: ResultSpec) -> ResultSpec:
    """Merges specifications of a result; of two values for one field, the earlier wins."""
    fields: dict[str, Any] = {}
    for one in reversed(specs):
        fields |= one.model_dump(exclude_defaults=True)
    return ResultSpec(**fields)


def _has_only_storage_fields(output: Any) -> bool:
    """Recognises a mapping of storage fields; ``name`` and ``ttl`` alone may be fields of a result."""
    if not isinstance(output, dict) or not _KEEPING.issuperset(output):
        return False
    store = output.get("store")
    stored = store is not None and not (isinstance(store, str) and is_template(store))
    return stored or "output_select" in output or "select" in output


def _keeping(block: Block) -> ResultSpec:
    """Reads ``store``, a tier or ``{kind, scope, ttl, compression}``; the other fields are beside it or in it."""
    inner = block.child("store") if isinstance(block.values.get("store"), dict) else None
    holder = inner or block
    key = "kind" if inner else "store"
    is_auto = str(holder.values.get(key)).strip().lower() == "auto"
    tier = None if is_auto else holder.choice(StoreTier, key)
    holder.drop(key)
    fields = {
        name: block.text(name) or (inner.text(name) if inner else None)
        for name in ("name", "scope", "compression", "content_type")
    }
    ttl = block.seconds("ttl", "ttl_seconds") or (inner.seconds("ttl", "ttl_seconds") if inner else None)
    select, threshold = _selection(block, "output_select", "select")
    read = block.build(ResultSpec, store=tier, ttl=ttl, select=select, threshold=threshold, **fields)
    return read or ResultSpec()


def _selection(block: Block, *names: str) -> tuple[tuple[str, ...], int | None]:
    """Paths, or ``{strategy: size_threshold, threshold_kb}``, as the paths and the bytes it stores above."""
    value = block.take(*names)
    if value is None:
        return (), None
    if not isinstance(value, dict) or "path" in value:
        return _paths(value), None
    rule = block.child(*names)
    assert rule is not None
    paths = _paths(rule.take("paths", "fields") or [])
    strategy = rule.text("strategy")
    kilobytes = rule.number("threshold_kb")
    if strategy not in (None, SIZE_THRESHOLD):
        hint = f"known is {SIZE_THRESHOLD!r}; the settings decide"
        rule.warn(f"strategy {strategy!r} is unknown, {hint}", "strategy")
    if strategy == SIZE_THRESHOLD and kilobytes is None:
        rule.warn(f"{SIZE_THRESHOLD} without 'threshold_kb'; the settings decide", "strategy")
    if strategy is None and not paths:
        rule.error("give a list of paths, for example [count, data.total]")
    rule.close()
    return paths, None if kilobytes is None else int(kilobytes * 1024)


def _paths(entries: Any) -> tuple[str, ...]:
    """Paths as text or as mappings with ``path``: ``$.rows[0].id`` is ``rows.0.id``."""
    listed = entries if isinstance(entries, list) else [entries]
    paths = [entry.get("path") if isinstance(entry, dict) else entry for entry in listed]
    return tuple(_INDEX.sub(r".\1", str(path).removeprefix("$.")) for path in paths if path)


def read_step_spec(spec: Block, own: Block) -> StepSpec:
    """Reads the part of a spec that concerns the step as a whole.

    Only a step whose ``own`` spec asks for a pod gets one, like the run's where it says nothing else.
    """
    pod = read_pod(own)
    run_pod = spec.reading.run_pod
    fields = spec.fields(
        StepSpec,
        admit=_admission(spec),
        pod=run_pod.under(pod) if pod is not None and run_pod is not None else pod,
    )
    return spec.build(StepSpec, **fields) or StepSpec()


def check_step_spec(spec: Block, *, free: bool = False) -> None:
    """Reports keys of a step's spec that say nothing to the step or its tasks; see :meth:`Block.close`."""
    spec.drop(*STEP_SPEC, *_STEP_ONLY, *TASK_SPEC)
    spec.close(STEP_SPEC, free=free)


def _admission(spec: Block) -> str | bool | None:
    """Reads ``policy.admit``: a template or boolean, or rules ``{when, then: {allow}}``; the first match counts."""
    direct = spec.take("admit")
    policy = spec.values.get("policy")
    admit = policy.get("admit") if isinstance(policy, dict) else None
    if admit is None:
        admit = direct
    if admit is None or isinstance(admit, (str, bool)):
        return admit
    rules = admit.get("rules") if isinstance(admit, dict) else admit
    if not isinstance(rules, list):
        message = "admit needs rules: [{when, then: {allow: true}}, {else: {then: {allow: false}}}]"
        spec.error(message, "policy")
        return None
    branches: list[str] = []
    last = "true"  # no match allows
    for rule in rules:
        body = rule.get("else", rule) if isinstance(rule, dict) else None
        then = body.get("then", body) if isinstance(body, dict) else None
        if not isinstance(then, dict) or "allow" not in then:
            message = "an admit rule is {when, then: {allow: true}} or {else: {then: {allow: false}}}"
            spec.error(message, "policy")
            return None
        allow = "true" if then["allow"] else "false"
        if "else" in rule:
            last = allow
        else:
            branches.append(f"{allow} if ({_expression(rule.get('when'))}) else ")
    return "{{ " + "".join(branches) + last + " }}"


def _expression(when: Any) -> str:
    text = str(when).strip()
    if text.startswith("{{") and text.endswith("}}"):
        return text[2:-2].strip()
    return "true" if when is True or text.lower() == "true" else "false"


def read_fanout(spec: Block) -> FanoutSpec:
    """Reads ``spec.fanout``."""
    block = spec.child("fanout")
    if block is None:
        return FanoutSpec()
    either = {name: block.flag(name, default=spec.flag(name)) for name in ("fail_fast", "allow_partial")}
    return block.read(FanoutSpec, **either) or FanoutSpec()
