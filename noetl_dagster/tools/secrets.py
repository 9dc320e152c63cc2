"""``kind: secrets``: finds a secret and hands out a handle for it, never its value."""

from __future__ import annotations

from noetl_dagster.errors import CredentialError, ToolError
from noetl_dagster.tools.access.credentials import HANDLE_PREFIX
from noetl_dagster.tools.base import Tool, Toolbox, ToolCall, ToolResult

_NAMES = ("secret", "path", "name")


class SecretsTool(Tool):
    """Makes sure that a secret exists.

    Input: ``provider`` (``env``, ``file`` or ``credential``; default ``env``); ``secret`` (also ``path`` or
    ``name``): a variable, a file below ``NOETL_SECRETS_PATH``, or a credential, whose field is ``key``.

    Output: ``{name, provider, handle}``. A result is kept in the event log, so it never holds the value: the
    handle ``secret://<provider>/<name>`` stands for it in ``auth``, alone (a bearer token) or in a mapping
    such as ``{type: header, header: X-API-Key, value: "{{ token.handle }}"}``. It opens for the call only.
    """

    kind = "secrets"

    async def run(self, call: ToolCall, box: Toolbox) -> ToolResult:
        provider = str(call.config.get("provider") or "env")
        name = next((call.config[field] for field in _NAMES if call.config.get(field)), None)
        if name is not None and "key" in call.config:
            name = f"{name}/{call.config['key']}"
        if not isinstance(name, str) or not name:
            raise ToolError(f"secrets in step {call.step} has no 'name'", kind=self.kind)
        handle = f"{HANDLE_PREFIX}{provider}/{name}"
        try:
            await box.credentials.reveal(handle)
        except (CredentialError, OSError) as error:
            raise ToolError(f"secrets in step {call.step}: {error}", kind="credential") from None
        return ToolResult(data={"name": name, "provider": provider, "handle": handle})
