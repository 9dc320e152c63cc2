"""``kind: nats``: messages, key-value buckets and object stores."""

from __future__ import annotations

from typing import Any

from noetl_dagster.errors import ProblemKind
from noetl_dagster.playbook.dialects.block import Block
from noetl_dagster.playbook.tool_kinds import NUMBER_WORDS, NUMBERS, TIMEOUT, ToolKind


def _check(block: Block, config: dict[str, Any]) -> None:
    if config.get("operation") == "subscribe" and not (config.get("stream") or config.get("subject")):
        block.error("subscribe needs 'stream' or 'subject'", "operation", ProblemKind.MISSING_FIELD)


KINDS = (
    ToolKind(
        "nats",
        "noetl_dagster.tools.nats.tool:NatsTool",
        {
            "operation": "publish, subscribe, kv_get, kv_put, kv_delete, kv_keys, object_put or object_get",
            "subject": "Subject of the message, or of the messages to read",
            ("value", "data", "payload", "message"): "Message or value: text as it is, anything else as JSON",
            "headers": "Headers of the message",
            "ack": "true waits until JetStream confirms the message",
            "bucket": "Key-value bucket or object store; a put creates a missing one",
            "key": "Key in the bucket",
            "prefix": "Beginning of the keys that kv_keys lists",
            "ttl": "Seconds that entries live in a bucket which this put creates",
            "stream": "JetStream stream to read; default: the one that has the subject",
            "start": "Sequence number of the first message; default: 1",
            "durable": "Name of a consumer; reading continues with the messages that it has not acknowledged",
            "numbers": NUMBERS,
            "max_messages": "Number of messages after which reading ends",
            TIMEOUT: "Seconds without a message after which reading ends; default: 5",
        },
        needs=("operation",),
        words={"numbers": NUMBER_WORDS},
        name_fills="name",
        check=_check,
    ),
)
