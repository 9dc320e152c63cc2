"""``spec.kubernetes``: what a run or a step asks of its pod."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.dialects.cluster.values import (
    ANNOTATIONS,
    EFFECTS,
    LABELS,
    LEAST_BYTES,
    OPERATORS,
    PULL_POLICIES,
    VARIABLES,
    Texts,
    check_toleration,
    devices_wrong,
    exceeds,
    named_wrong,
    object_wrong,
    quantity_wrong,
    valued_wrong,
    word_wrong,
)
from noetl_dagster.playbook.dialects.spelling import POD_KEYS, POD_SPELLINGS
from noetl_dagster.playbook.pods import GPU, Amount, Pod
from noetl_dagster.playbook.wording import described, is_template

_TOLERATION = {
    "key": None,
    "operator": OPERATORS,
    "value": None,
    "effect": EFFECTS,
    "toleration_seconds": None,
}


def read_pod(spec: Block) -> Pod | None:
    """``kubernetes`` of a spec; None where it asks for no pod. An empty mapping asks for one like the run's."""
    key = spec.spelled("kubernetes")
    if key is None or spec[key] is None or spec[key] is False:
        return None
    if spec[key] is True:
        return Pod()
    block = spec.child(key)
    if block is None:
        return None
    secrets, config_maps = _env_from(block)
    pod = block.build(
        Pod,
        image=_plain(block, "image"),
        image_pull_policy=_one_of(block, PULL_POLICIES, "image_pull_policy"),
        cpu=_amount(block, "cpu", "500m, 2 or {request: 1, limit: 2}"),
        memory=_amount(block, "memory", "512Mi, 4Gi or {request: 2Gi, limit: 4Gi}", least=LEAST_BYTES),
        ephemeral_storage=_amount(block, "ephemeral_storage", "20Gi", least=LEAST_BYTES),
        gpu=_gpu(block),
        node_selector=_texts(block, "node_selector", LABELS),
        tolerations=_tolerations(block),
        service_account=_object(block, "service_account"),
        env=_texts(block, "env", VARIABLES),
        env_secrets=secrets,
        env_config_maps=config_maps,
        labels=_texts(block, "labels", LABELS),
        annotations=_texts(block, "annotations", ANNOTATIONS),
        priority_class=_object(block, "priority_class"),
    )
    block.close(POD_KEYS)
    return pod


def _plain(block: Block, name: str) -> str | None:
    """Text that is no template: pods are described when the playbook is loaded."""
    key = block.spelled(*POD_SPELLINGS.get(name, (name,)))
    value = None if key is None else block[key]
    if key is None or value is None:
        return None
    if not isinstance(value, str | int | float) or isinstance(value, bool) or not str(value).strip():
        block.error(f"{key} must be text, found {described(value)}", key)
        return None
    if is_template(str(value)):
        block.error(_NO_TEMPLATE.format(key), key)
        return None
    return str(value).strip()


_NO_TEMPLATE = "{} is no template: pods are described when the playbook is loaded; write the value itself"


def _one_of(block: Block, words: tuple[str, ...], name: str) -> str | None:
    text = _plain(block, name)
    wrong = None if text is None else word_wrong(name, text, words)
    if wrong is not None:
        block.error(wrong, _key(block, name))
        return None
    return text


def _object(block: Block, name: str) -> str | None:
    """The name of an object of the cluster."""
    text = _plain(block, name)
    wrong = None if text is None else object_wrong(text)
    if wrong is not None:
        block.error(f"{name} {wrong}", _key(block, name))
        return None
    return text


def _amount(block: Block, name: str, example: str, *, least: Decimal = Decimal(0)) -> Amount | None:
    """A quantity, which is request and limit in one, or ``{request, limit}``."""
    key = block.spelled(*POD_SPELLINGS.get(name, (name,)))
    value = None if key is None else block[key]
    if key is None or value is None:
        return None
    if not isinstance(value, dict):
        quantity = _quantity(block, key, value, example, least)
        return None if quantity is None else Amount(request=quantity, limit=quantity)
    parts = block.reading.block(block.values, key, f"{block.what}, {key}")
    assert parts is not None
    found: dict[str, str | None] = {}
    for part in ("request", "limit"):
        at = parts.spelled(part, f"{part}s")
        found[part] = None if at is None else _quantity(parts, at, parts[at], example, least)
    parts.close(("request", "limit"))
    request, limit = found["request"], found["limit"]
    if request is not None and limit is not None and exceeds(request, limit):
        parts.error(f"request {request} is more than limit {limit}; raise the limit", "request")
        return None
    return Amount(request=request, limit=limit) if request or limit else None


def _quantity(block: Block, key: str, value: Any, example: str, least: Decimal) -> str | None:
    wrong = (
        _NO_TEMPLATE.format(key)
        if isinstance(value, str) and is_template(value)
        else quantity_wrong(key, value, example, least)
    )
    if wrong is not None:
        block.error(wrong, key)
        return None
    return str(value).strip()


def _gpu(block: Block) -> dict[str, int] | None:
    """A number of GPUs, or a mapping of the cluster's names for devices to numbers."""
    key = block.spelled("gpu")
    value = None if key is None else block[key]
    if key is None or value is None:
        return None
    asked = value if isinstance(value, dict) else {GPU: value}
    found = {}
    for name, number in asked.items():
        wrong = devices_wrong("gpu", name, number)
        if wrong is not None:
            block.error(wrong, key)
            return None
        found[str(name)] = int(str(number).strip())
    return found


def _texts(block: Block, name: str, sort: Texts) -> dict[str, str] | None:
    """A mapping of names to texts; numbers and booleans are taken as they are written."""
    spelled = POD_SPELLINGS.get(name, (name,))
    key = _key(block, name)
    if key not in block.values or block.values[key] is None:
        block.drop(*spelled)
        return None
    found: dict[str, str] = {}
    for word, value in block.mapping(*spelled).items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        wrong = named_wrong(key, word, sort)
        if wrong is None and (isinstance(value, dict | list) or value is None):
            wrong = f"{key}: {word!r} must be text, found {described(value)}"
        elif wrong is None and is_template(text):
            wrong = _NO_TEMPLATE.format(f"{key}: {word!r}")
        wrong = wrong or valued_wrong(key, text, sort)
        if wrong is not None:
            block.error(wrong, key)
        else:
            found[str(word)] = text
    return found


def _tolerations(block: Block) -> tuple[dict[str, Any], ...] | None:
    key = block.spelled("tolerations")
    value = None if key is None else block[key]
    if key is None or value is None:
        return None
    if not isinstance(value, list):
        block.error(
            f"tolerations must be a list of {{key, operator, value, effect}}, found {described(value)}", key
        )
        return None
    return tuple(one for one in (_toleration(block, key, index) for index in range(len(value))) if one)


def _toleration(block: Block, key: str, index: int) -> dict[str, Any] | None:
    entry = block.reading.block(block[key], index, f"{block.what}, toleration {index + 1}")
    if entry is None:
        return None
    found: dict[str, Any] = {}
    for name, words in _TOLERATION.items():
        if name == "toleration_seconds":
            seconds = entry.whole("toleration_seconds", "tolerationSeconds")
            found |= {} if seconds is None else {name: seconds}
            continue
        text = _plain(entry, name) if words is None else _one_of(entry, words, name)
        if text is not None:
            found[name] = text
    check_toleration(entry, found)
    entry.close(_TOLERATION)
    return found


def _env_from(block: Block) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    """``{secrets: [...], config_maps: [...]}``, or Kubernetes' list of ``secretRef`` and ``configMapRef``."""
    key = block.spelled(*POD_SPELLINGS["env_from"])
    value = None if key is None else block[key]
    if key is None or value is None:
        return None, None
    if isinstance(value, list):
        pairs = [pair for index in range(len(value)) for pair in _reference(block, key, index)]
        return (
            tuple(name for kind, name in pairs if kind == "secret"),
            tuple(name for kind, name in pairs if kind == "config_map"),
        )
    inner = block.reading.block(block.values, key, f"{block.what}, {key}")
    if inner is None:
        return None, None
    secrets = _names(inner, "secrets", "secret")
    config_maps = _names(inner, "config_maps", "config_map", "configMaps")
    inner.close(("secrets", "config_maps"))
    return secrets, config_maps


def _reference(block: Block, key: str, index: int) -> Iterator[tuple[str, str]]:
    entry = block.reading.block(block[key], index, f"{block.what}, {key} {index + 1}")
    if entry is None:
        return
    spellings = {"secret": ("secretRef", "secret_ref"), "config_map": ("configMapRef", "config_map_ref")}
    for kind, names in spellings.items():
        reference = entry.child(*names)
        name = None if reference is None else _object(reference, "name")
        if name is not None:
            yield kind, name
    entry.close(("secretRef", "configMapRef"))


def _names(block: Block, *names: str) -> tuple[str, ...]:
    found = block.names(*names)
    wrongs = {name: object_wrong(name) for name in found}
    for wrong in filter(None, wrongs.values()):
        block.error(wrong, next(one for one in names if one in block))
    return tuple(name for name in found if wrongs[name] is None)


def _key(block: Block, name: str) -> str:
    """The spelling of a field that the playbook uses."""
    return next((one for one in POD_SPELLINGS.get(name, (name,)) if one in block), name)
