"""``kind: secrets``: finds a secret and returns a handle for it, never its value."""

from __future__ import annotations

from itertools import chain

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.playbook.tool_kinds import SECRET_PROVIDERS, ToolKind, secret_provider
from noetl_dagster.tools.base import Tool, ToolCall, ToolContext, ToolResult

KINDS = (
    ToolKind(
        "secrets",
        "noetl_dagster.tools.secrets:SecretsTool",
        {
            "provider": "Store of the secret; default: env",
            ("secret", "secret_name", "secret_id"): "Name of the secret",
            "path": "Name of the secret, as a path",
            "key": "Field of the secret",
        },
        name_fills="name",
        words={"provider": tuple(chain.from_iterable(SECRET_PROVIDERS))},
    ),
)
_NAMES = ("secret", "path", "name")


class SecretsTool(Tool):
    """Checks that a secret exists.

    Input: ``provider`` (default ``env``); ``secret`` (also ``path`` or ``name``); ``key``, a field of it:

    ========== ========================================================= ==============================
    provider   secret                                                    key
    ========== ========================================================= ==============================
    env        a variable
    file       a file below ``NOETL_SECRETS_PATH``
    credential a credential                                              its field
    aws        name or ARN of a secret of AWS Secrets Manager            a field of a JSON object
    aws_ssm    a parameter of AWS Systems Manager                        a field of a JSON object
    google     ``db``, ``projects/p/secrets/db``, ``.../versions/3``     a field of a JSON object
    kubernetes ``<namespace>/<secret>``                                  its key
    ========== ========================================================= ==============================

    Output: ``{name, provider, handle}``. The event log keeps results, so they never hold the value: the handle
    ``secret://<provider>/<name>`` (with ``#<key>``) replaces it in ``auth``, alone (a bearer token) or in a mapping
    such as ``{type: header, header: X-API-Key, value: "{{ token.handle }}"}``. It is resolved for the call only.
    """

    async def run(self, call: ToolCall, context: ToolContext) -> ToolResult:
        """Resolves the secret, and returns its handle."""
        from noetl_dagster.tools.access.credentials import HANDLE_PREFIX
        from noetl_dagster.tools.access.managers.asking import KEY, MANAGERS

        asked = str(call.config.get("provider") or "env")
        provider = secret_provider(asked) or asked
        name = next((call.config[field] for field in _NAMES if call.config.get(field)), None)
        if name is not None and "key" in call.config:
            name = f"{name}{KEY if provider in MANAGERS else '/'}{call.config['key']}"
        if not isinstance(name, str) or not name:
            raise ToolError(f"secrets in step {call.step} has no 'name'", kind="schema")
        handle = f"{HANDLE_PREFIX}{provider}/{name}"
        try:
            await context.credentials.reveal(handle)
        except (CredentialError, OSError) as error:
            raise ToolError(
                f"secrets in step {call.step}: {error}",
                kind=error.kind if isinstance(error, CredentialError) else "credential",
                retryable=isinstance(error, CredentialError) and error.retryable,
            ) from None
        return ToolResult(data={"name": name, "provider": provider, "handle": handle})
