"""Retries: the rules of policies and ``retry`` blocks, their conditions and delays."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from noetl_dagster.errors import TemplateError, UndefinedNameError
from noetl_dagster.playbook.models import Backoff, PolicyAction
from noetl_dagster.playbook.templates.rendering import Condition, Fetch, holds_async
from noetl_dagster.worker.program import DEFAULT_ERROR_ACTION, DEFAULT_OK_ACTION, Rule, TaskProgram

LONGEST_DELAY = 60.0
JITTER = 0.1


async def matching_rule(
    program: TaskProgram, scope: Mapping[str, Any], fetch: Fetch, *, failed: bool
) -> Rule | None:
    """Returns the first rule whose ``when`` is true, the ``else`` rule when none is, or None.

    A ``when`` that uses a field that the output does not have (``output.http.status`` of a call without a response)
    does not match. After a failed call no ``when`` matches that cannot be computed, such as the length of missing
    data, so that it hides neither the error nor a later rule.
    """
    otherwise = None
    for rule in program.rules:
        if rule.when is None:
            otherwise = rule
        elif await matches(rule.when, scope, fetch, TemplateError if failed else UndefinedNameError):
            return rule
    return otherwise


async def matches(
    when: Condition, scope: Mapping[str, Any], fetch: Fetch, tolerated: type[TemplateError] = TemplateError
) -> bool:
    """Evaluates the condition of a rule; one that uses fields that the outcome does not have is false."""
    try:
        return await holds_async(when, scope, fetch)
    except tolerated:
        return False


def default_action(program: TaskProgram, *, failed: bool) -> PolicyAction:
    """Returns the action without a matching rule: failures fail without a policy, all else continues."""
    if program.rules or not failed:
        return DEFAULT_OK_ACTION
    return DEFAULT_ERROR_ACTION


def delay_before(backoff: Backoff, delay: float, retries: int, *, retry_after: float | None = None) -> float:
    """Returns the seconds to wait before the next try.

    Args:
        retries: retries made so far, plus one for the coming one (1, 2, 3, ...).
        retry_after: seconds that the peer requested; used if longer.
    """
    match backoff:
        case Backoff.NONE:
            seconds = delay
        case Backoff.LINEAR:
            seconds = delay * retries
        case Backoff.EXPONENTIAL:
            seconds = delay * 2 ** min(retries - 1, 32)
    seconds = min(seconds, LONGEST_DELAY) * (1 + random.uniform(0, JITTER))
    return max(seconds, retry_after or 0.0)
