"""A JSON Schema of the language as it is written, for editors: both generations of words.

It is built from the tables of spellings and from the models, so that it cannot drift from the loader. The
loader stays the judge: it also checks names, targets and templates.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, get_origin

from pydantic import BaseModel

from noetl_dagster.playbook import assets, models, tool_kinds
from noetl_dagster.playbook.dialects.spec import TASK_SPEC
from noetl_dagster.playbook.fields import Declaration, Seconds, declarations
from noetl_dagster.playbook.pods import Amount, Pod
from noetl_dagster.settings import StoreTier

Schema = dict[str, Any]

ANY: Schema = {}
TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": ["number", "string"], "description": "a number, or a template"}
SECONDS: Schema = {"type": ["number", "string"], "description": "seconds, or text such as '30s', '5m', '1h'"}
FLAG: Schema = {"type": ["boolean", "string"]}
CONDITION: Schema = {"type": ["string", "boolean"], "description": 'a template such as "{{ ctx.ready }}"'}
MAPPING: Schema = {"type": ["object", "null"]}
TEXTS: Schema = {"type": "array", "items": TEXT}
ONE_OR_MORE: Schema = {"anyOf": [TEXT, TEXTS]}
_TYPES: dict[Any, Schema] = {Seconds: SECONDS, Any: ANY, str: TEXT, int: NUMBER, float: NUMBER, bool: FLAG}
BACKOFF: Schema = {
    "anyOf": [
        {"enum": [*models.Backoff, "constant", "fixed"]},
        {"type": "number"},
        {"type": "string", "pattern": r"\d|\{"},
    ],
    "description": "how the delay grows; a number of seconds, or '500ms', is a constant delay",
}
ASSET_KEY: Schema = {**ONE_OR_MORE, "description": "'warehouse/patients' or [warehouse, patients]"}


def language_schema() -> Schema:
    """Returns the JSON Schema (2020-12) of a playbook file."""
    spec = _spec()["properties"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "NoETL playbook",
        **closed(
            {
                "apiVersion": {"const": tool_kinds.API_VERSION},
                "kind": {"const": tool_kinds.KIND},
                "metadata": opened(dict.fromkeys(tool_kinds.METADATA_KEYS, ANY) | {"name": TEXT, "path": TEXT}),
                "workload": MAPPING,
                "workflow": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/step"}},
                "keychain": {"type": ["array", "object", "null"]},
                "workbook": {"type": ["array", "object", "null"]},
                "executor": opened(references("spec")),
                "spec": opened({name: spec[name] for name in tool_kinds.DEFAULTS}),
                "strict": {**FLAG, "description": "an undefined name in a 'when' is an error at once"},
                "dagster": _dagster(),
                "tracing": {"anyOf": [{"type": ["boolean", "null"]}, closed(fields_of(models.Tracing))]},
            },
            required=("apiVersion", "kind", "workflow"),
        ),
        "$defs": {
            "step": _step(),
            "tool": _tool(),
            "task": _task(),
            "spec": _spec(),
            "policy": _policy(),
            "next": _next(),
            "arc": _arc(),
            "loop": _loop(),
            "retry": _retry(),
            "sink": opened(fields_of(models.Sink, tool=ANY, auth=ANY)),
        },
    }


def closed(properties: Schema, *, required: Iterable[str] = ()) -> Schema:
    """Describes a mapping with these keys and no others."""
    return opened(properties, required=required) | {"additionalProperties": False}


def opened(properties: Schema, *, required: Iterable[str] = ()) -> Schema:
    """Describes a mapping with these keys and any others."""
    schema: Schema = {"type": "object", "properties": properties}
    return schema | {"required": list(required)} if required else schema


def spelled(names: Iterable[str], schema: Schema) -> Schema:
    """Returns the same schema under every spelling; the older ones are marked as deprecated."""
    canonical, *older = names
    return {canonical: schema} | {name: {**schema, "deprecated": True} for name in older}


def references(*names: str) -> Schema:
    """Properties whose schemas are definitions of the same name."""
    return {name: {"$ref": f"#/$defs/{name}"} for name in names}


def words(kind: type[StrEnum], *others: str) -> Schema:
    """Accepts the words of an enum, and others."""
    return {"enum": [*kind, *others]}


def fields_of(model: type[BaseModel], **others: Schema) -> Schema:
    """Returns the fields of a model under every spelling; ``others`` have a schema of their own."""
    fields: Schema = {}
    for one in declarations(model):
        schema = others.get(one.name, _schema_of(one))
        about = {"description": one.description} if one.description else {}
        fields |= spelled(one.spellings, {**schema, **about})
    return fields


def _schema_of(field: Declaration) -> Schema:
    type_ = field.type
    if type_ in _TYPES:
        return _TYPES[type_]
    if get_origin(type_) is dict:
        return MAPPING
    if get_origin(type_) is tuple:
        return ONE_OR_MORE
    if issubclass(type_, StrEnum):
        return words(type_, *field.words)
    return closed(fields_of(type_))


SET_BLOCKS = spelled(tool_kinds.SET_BLOCKS, MAPPING)
DESCRIPTION: Schema = dict.fromkeys(tool_kinds.DESCRIPTION, TEXT)
DOCUMENTARY: Schema = {**dict.fromkeys(tool_kinds.DOCUMENTARY, ANY), **DESCRIPTION}
_PATH: Schema = {"anyOf": [TEXT, opened({"path": TEXT}, required=("path",))]}
_STRATEGY = closed({"strategy": TEXT, "threshold_kb": NUMBER, "paths": TEXTS, "fields": TEXTS})
SELECTION: Schema = {"anyOf": [_PATH, {"type": "array", "items": _PATH}, _STRATEGY]}
"""``output_select``: paths, or a strategy."""


def _step() -> Schema:
    asset = closed(fields_of(assets.AssetSpec, key=ASSET_KEY, tags=ANY))
    partition = {**TEXT, "description": "same, latest, all, or the key of one"}
    source = closed({"asset": ASSET_KEY, "partition": partition}, required=("asset",))
    return closed(
        {
            **DOCUMENTARY,
            "step": TEXT,
            **references("tool", "next", "loop", "spec", "retry", "sink"),
            "asset": {"anyOf": [{"type": ["boolean", "null"]}, asset]},
            "checks": {"type": ["array", "object"], "items": _check()},
            "from": {"type": "object", "additionalProperties": {"anyOf": [ASSET_KEY, source]}},
            "state": closed(fields_of(models.StateSpec), required=("key", "initial")),
            **SET_BLOCKS,
            **spelled(tool_kinds.INPUT, MAPPING),
            **spelled(tool_kinds.OUTPUT, ANY),
            "output_select": SELECTION,
        },
        required=("step",),
    )


def _check() -> Schema:
    asks: dict[assets.CheckKind, Schema] = {
        assets.CheckKind.WHEN: CONDITION,
        assets.CheckKind.UNIQUE: ONE_OR_MORE,
        assets.CheckKind.NOT_NULL: ONE_OR_MORE,
        assets.CheckKind.ACCEPTED: {"type": "object", "additionalProperties": {"type": "array"}},
        assets.CheckKind.BETWEEN: {"type": "object", "additionalProperties": {"type": "array"}},
        assets.CheckKind.ROW_COUNT: {"type": ["integer", "object", "array"]},
        assets.CheckKind.FRESH: {"type": "object", "additionalProperties": SECONDS},
    }
    common = {"name": TEXT, "description": TEXT, "severity": words(assets.Severity), "blocking": FLAG}
    tests = {kind.value: test for kind, test in asks.items()}  # orjson refuses keys that are members of an enum
    return closed(common | tests) | {"oneOf": [{"required": [kind.value]} for kind in assets.CheckKind]}


def _dagster() -> Schema:
    status = {"anyOf": [words(assets.ScheduleStatus), FLAG]}
    schedule = closed(fields_of(assets.ScheduleSpec, status=status), required=("cron",))
    dimension = closed(
        {
            "kind": words(assets.PartitionKind),
            **dict.fromkeys(("start", "end", "timezone", "workload", "dynamic"), TEXT),
            "static": {"type": "array", "minItems": 1},
        }
    )
    two = {"type": "object", "minProperties": 2, "maxProperties": 2, "additionalProperties": dimension}
    source = fields_of(assets.ObservationSpec, asset=ASSET_KEY)
    return closed(
        {
            "group": TEXT,
            "owners": TEXTS,
            "tags": {"type": ["object", "array"]},
            "pools": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}},
            "schedules": {"type": ["array", "object"], "items": schedule},
            "partitions": {"anyOf": [dimension, closed({"two": two}, required=("two",))]},
            "automation": {
                "anyOf": [
                    {"enum": [assets.AutomationKind.EAGER, assets.AutomationKind.ON_MISSING]},
                    closed({"on_cron": TEXT, "timezone": TEXT}, required=("on_cron",)),
                ]
            },
            "freshness": closed(fields_of(assets.FreshnessSpec), required=("fail_after",)),
            "observe": {"type": "array", "items": closed(source, required=("asset",))},
        }
    )


def _tool() -> Schema:
    task = {"$ref": "#/$defs/task"}
    labelled = {"type": "object", "additionalProperties": task, "not": {"required": ["kind"]}}
    return {"anyOf": [task, {"type": "array", "minItems": 1, "items": {"anyOf": [task, labelled]}}, labelled]}


def _task() -> Schema:
    common = {
        "kind": {"enum": list(tool_kinds.TOOL_KINDS)},
        "name": TEXT,
        **DOCUMENTARY,
        **SET_BLOCKS,
        **spelled(tool_kinds.INPUT, {"type": ["object", "array", "null"]}),
        **spelled(tool_kinds.OUTPUT, ANY),
        **spelled(tool_kinds.AUTH, ANY),
        "output_select": SELECTION,
        **references("spec", "retry", "sink"),
        "assert": closed(fields_of(models.Assertion)),
    }
    kinds = [_kind(*entry) for entry in tool_kinds.TOOL_KINDS.items()]
    return opened(common, required=("kind",)) | {"allOf": kinds}


def _kind(name: str, kind: tool_kinds.ToolKind) -> Schema:
    fields: Schema = {}
    for names in kind.spellings.values():
        words = kind.words.get(names[0], ())
        flags = [{"type": "boolean"}] if {"true", "false"} <= {*words} else []
        open_or_named = {"anyOf": [{"enum": [*words]}, *flags, {"type": "string", "pattern": "\\{\\{"}]}
        about = {"description": kind.meanings[names[0]]}
        fields |= spelled(names, (open_or_named if words else ANY) | about)
    then: Schema = {"properties": fields}
    choices: list[Schema] = [{"required": [word]} for field in kind.needs for word in kind.spellings[field]]
    choices += [{"required": [key], "properties": {key: choice}} for key in kind.below for choice in choices]
    if kind.name_fills in kind.needs:
        choices.append({"required": ["name"]})
    if kind.needs_all:
        then["required"] = list(kind.needs)
    elif choices:
        then["anyOf"] = choices
    return {"if": {"properties": {"kind": {"const": name}}, "required": ["kind"]}, "then": then}


def _spec() -> Schema:
    pool = {**TEXT, "description": "of workers with dispatch: workers; else one of dagster.pools"}
    fields = fields_of(models.StepSpec, admit=ANY, pool=pool, pod=ANY)
    del fields["pod"]
    return opened(
        {
            **fields,
            "timeout": {"anyOf": [SECONDS, MAPPING]},
            **references("policy", "retry"),
            "on_error": {"anyOf": [words(models.Directive), _action()]},
            "result": opened({"store": {"anyOf": [words(StoreTier), MAPPING]}, "ttl": SECONDS, "name": TEXT}),
            "loop_mode": words(models.LoopMode, *models.LOOP_MODES),
            "fanout": closed(fields_of(models.FanoutSpec)),
            "kubernetes": {"anyOf": [_pod(), {"type": ["boolean", "null"]}]},
            "allow_partial": FLAG,
            "fail_fast": FLAG,
        }
    )


def _pod() -> Schema:
    amount: Schema = {"anyOf": [{"type": ["string", "number"]}, closed(fields_of(Amount))]}
    reference = closed(dict.fromkeys(("secretRef", "configMapRef"), closed({"name": TEXT}, required=("name",))))
    sources = closed({"secrets": ONE_OR_MORE, "config_maps": ONE_OR_MORE})
    env_from: Schema = {
        "anyOf": [sources, {"type": "array", "items": reference}],
        "description": "{secrets: [...], config_maps: [...]}: their keys become environment variables",
    }
    fields = fields_of(
        Pod,
        **dict.fromkeys(("cpu", "memory", "ephemeral_storage"), amount),
        gpu={"type": ["integer", "object"]},
        tolerations={"type": "array", "items": {"type": "object"}},
    )
    del fields["env_secrets"], fields["env_config_maps"]
    return closed(fields | spelled(("env_from", "envFrom"), env_from))


def _action() -> Schema:
    return closed({**fields_of(models.PolicyAction, backoff=BACKOFF), **SET_BLOCKS})


def _policy() -> Schema:
    action = _action()
    rule = closed({**spelled(tool_kinds.WHEN, CONDITION), "then": action, **DESCRIPTION}, required=("then",))
    otherwise = closed({"else": {"anyOf": [closed({"then": action}), action]}}, required=("else",))
    rules = {"type": "array", "items": {"anyOf": [rule, otherwise]}}
    return {"anyOf": [rules, opened({"rules": rules})]}


def _next() -> Schema:
    arcs = {"type": "array", "items": {"anyOf": [TEXT, {"$ref": "#/$defs/arc"}]}}
    spec = closed({"mode": words(models.RoutingMode), "policy": ANY})
    router = closed({"spec": spec, "arcs": arcs}, required=("arcs",))
    return {"anyOf": [TEXT, arcs, {"$ref": "#/$defs/arc"}, router, {"type": "null"}]}


def _arc() -> Schema:
    return closed(
        {
            "step": TEXT,
            **spelled(tool_kinds.WHEN, CONDITION),
            "on": {"enum": [*models.ARC_WORDS]},
            **SET_BLOCKS,
            **spelled(tool_kinds.INPUT, MAPPING),
            **DESCRIPTION,
        },
        required=("step",),
    )


def _loop() -> Schema:
    settings = (*tool_kinds.LOOP_SETTINGS, *tool_kinds.MAX_IN_FLIGHT)
    own = {name: schema for name, schema in fields_of(models.Loop).items() if name in settings}
    return closed(
        {
            **spelled(tool_kinds.LOOP_IN, ANY),
            **spelled(tool_kinds.LOOP_ITERATOR, TEXT),
            "cursor": closed(fields_of(models.CursorSpec, kind={"enum": [*tool_kinds.CURSOR_KINDS]})),
            "spec": closed({**own, **dict.fromkeys(TASK_SPEC, ANY)}),
            **own,
            "policy": MAPPING,
            **DESCRIPTION,
        }
    )


def _retry() -> Schema:
    collect = opened(fields_of(models.Collect))
    limits = fields_of(models.RetryRule, when=CONDITION, backoff=BACKOFF, collect=collect, **references("sink"))
    then = opened({name: schema for name, schema in limits.items() if name != "when"})
    rule = opened({"when": CONDITION, "then": then})
    statuses = {"type": ["array", "integer"]}
    flat = opened({**limits, "retry_on": ONE_OR_MORE, "retry_on_status": statuses})
    short = {"type": ["boolean", "integer", "null"]}
    return {"anyOf": [{"type": "array", "items": rule}, rule, flat, short]}
