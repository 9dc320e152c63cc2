"""``kind: artifact``, also ``result`` and ``resolve``: stores values, and reads them back."""

from __future__ import annotations

from noetl_dagster.playbook.tool_kinds import NUMBER_WORDS, NUMBERS, ToolKind

KINDS = tuple(
    ToolKind(
        name,
        "noetl_dagster.tools.artifact.tool:ArtifactTool",
        {
            "action": "get reads, put stores; default: put if there is a value, else get",
            ("ref", "result_ref", "reference"): "Reference to read, its logical name, or the name of a step",
            "uri": "Address of a file or object to read",
            "step": "Step of this execution whose stored result is read",
            ("value", "data", "payload", "content"): "Value to store",
            "store": "Storage tier of the value",
            "compress": "Compression of the stored value: none, gzip or lz4",
            "content_type": "Content type of the stored value",
            "ttl": "Seconds until the stored value expires",
            "scope": "Lifetime of the stored value: step, execution, workflow or permanent",
            "format": "Format of the rows at uri: parquet, jsonl, csv or json; default: the ending of the name",
            "numbers": NUMBERS,
        },
        words={"numbers": NUMBER_WORDS},
        name_fills="name",
        without_effect=("select", "as", "encoding"),
        takes_references=True,
        keeps_to_driver=True,  # what is stored in memory is in this process
    )
    for name in ("artifact", "resolve", "result")
)
