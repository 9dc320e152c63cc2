"""``kind: spark``: its fields; Spark SQL and PySpark over stored results."""

from __future__ import annotations

from noetl_dagster.playbook.tool_kinds import SCRIPT, ToolKind

KINDS = (
    ToolKind(
        "spark",
        "noetl_dagster.tools.spark.tool:SparkTool",
        {
            ("command", "sql", "query"): (
                "Spark SQL; every input is a view, and the rows of the last statement are the result"
            ),
            "code": "PySpark code that defines main or sets result",
            "function": "Function to call, as file.py:name",
            "script": SCRIPT,
            "libs": "Modules to import: a list, or a mapping of aliases",
            "from": "Results to read in place, by step, task or task.key: a list, or a mapping of names",
            "format": "Format of the written dataset; default: parquet",
            "options": "Options of Spark's writer",
            "params": "Values of :name in SQL",
            "partition_by": "Columns by which the written dataset is partitioned",
            "schemas": "Schemas of JSON inputs by name, such as a INT, or infer",
            "collect": "true returns {rows, row_count, columns} instead of a dataset",
            "max_rows": "Maximum of collected rows; default: 10,000",
            "tier": "Storage tier of the written dataset",
        },
        without_effect=("source", "target", "conf", "path", "output_as", "mode"),
        takes_references=True,
        keeps_to_driver=True,
    ),
)
