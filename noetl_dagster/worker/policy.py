"""What to do after a task: the first matching rule of its policy."""

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
    """The first rule whose ``when`` holds, the ``else`` rule when none does, or None.

    A ``when`` that compares something the output does not have (``output.http.status`` of a call that
    never got an answer) does not match; of a failed call any ``when`` that cannot be computed, such as the
    length of data that never came, so that it hides neither the error nor a later rule.
    """
    otherwise = None
    for rule in program.rules:
        if rule.when is None:
            otherwise = rule
        elif await _matches(rule.when, scope, fetch, TemplateError if failed else UndefinedNameError):
            return rule
    return otherwise


async def _matches(
    when: Condition, scope: Mapping[str, Any], fetch: Fetch, tolerated: type[TemplateError]
) -> bool:
    try:
        return await holds_async(when, scope, fetch)
    except tolerated:
        return False


def default_action(program: TaskProgram, *, failed: bool) -> PolicyAction:
    """No policy: success continues, failure fails. A policy without a matching rule continues."""
    if program.rules or not failed:
        return DEFAULT_OK_ACTION
    return DEFAULT_ERROR_ACTION


def delay_before(backoff: Backoff, delay: float, retries: int, *, retry_after: float | None = None) -> float:
    """Seconds to wait before the next try.

    Args:
        retries: retries made so far, plus one for the coming one (1, 2, 3, ...).
        retry_after: seconds that the peer asked for; honoured when longer.
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
