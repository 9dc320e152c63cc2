"""What the fields of the tools mean: one description for the reference pages and for the JSON Schema of editors."""

from __future__ import annotations

from collections.abc import Mapping

_SCRIPT = "File or URL with the code: a path, or {uri, source: {type}}"
_PIPES = (
    "Lets the processes report to the Dagster run with open_dagster_pipes: true through a file, "
    "objects through the object store"
)

_SQL = {
    "command": "One or more statements, or a list of them",
    "script": "File or URL with the statements: a path, or {uri, source: {type}}",
    "params": "Values of the statements: a mapping for :name, a list for $1, $2; default: the task's input",
    "as": "Form of the result: rows, or table for one Parquet table by reference",
    "chunk_size": "Maximum of rows in a chunk of a large result",
}
_SERVER = _SQL | {"timeout": "Seconds after which the statements are stopped and the call fails"}
_FILE = {"database": "Database file, relative to the playbook's folder; default: in memory, for this call only"}

_ARTIFACT = {
    "action": "get reads, put stores; default: put if there is a value, else get",
    "ref": "Reference to read, its logical name, or the name of a step",
    "uri": "Address of a file or object to read",
    "step": "Step of this execution whose stored result is read",
    "value": "Value to store",
    "store": "Storage tier of the value",
    "compress": "Compression of the stored value: none, gzip or lz4",
    "content_type": "Content type of the stored value",
    "ttl": "Seconds until the stored value expires",
    "scope": "Lifetime of the stored value: step, execution, workflow or permanent",
    "format": "Format of the rows at uri: parquet, jsonl, csv or json; default: the ending of the name",
}
_SHELL = {
    "cmds": "Commands that one shell runs in order, until one fails: text or a list",
    "code": "Text of a script",
    "script": _SCRIPT,
    "args": "Arguments of the script",
    "interpreter": "Program that runs the script; default: by its first line #!, then by the ending of its name",
    "shell": "Shell that runs cmds; default: /bin/sh",
    "env": "Further environment variables",
    "cwd": "Working folder; default: the playbook's folder",
    "timeout": "Seconds after which all processes of the call are killed and it fails, with error kind timeout",
    "pipes": _PIPES,
}
_BUCKET = {
    "operation": "upload (default), download, list or delete",
    "uri": "Address of the object, with bucket and key",
    "bucket": "Name of the bucket; default: that of the credential or the installation",
    "key": "Key of the object; for delete also a list",
    "source": "Local file of an upload, object of a download",
    "destination": "Object of an upload, local file of a download",
    "file": "Local file, relative to the playbook's folder",
    "content": "Content to upload instead of a file: text, bytes, rows, any other value as JSON, or a reference",
    "content_type": "Content type of the uploaded object",
    "metadata": "Metadata of the uploaded object, a mapping of texts",
    "prefix": "Beginning of the keys to list or delete",
    "limit": "Maximum of listed objects",
    "format": "Format of the content; default: the ending of the key",
    "encoding": "base64 decodes the text in content before it is uploaded",
}

FIELD_MEANINGS: Mapping[str, Mapping[str, str]] = {
    "artifact": _ARTIFACT,
    "bigquery": _SERVER,
    "container": {
        "image": "Image of the container",
        "command": "Command: text for /bin/sh -c, or a list",
        "script": _SCRIPT,
        "args": "Arguments of the command",
        "env": "Environment variables; those with a secret are passed through a Secret of the Job",
        "env_from": "ConfigMaps and Secrets whose keys become variables, as in Kubernetes",
        "namespace": "Namespace of the Job; default: that of the process's own pod, else of the kubeconfig",
        "resources": "Requests and limits, as in Kubernetes",
        "service_account": "Service account of the pod",
        "working_dir": "Working folder in the container",
        "volumes": "Volumes of the pod, as in Kubernetes",
        "volume_mounts": "Mounts of the container, as in Kubernetes",
        "node_selector": "Labels that the node must have",
        "tolerations": "Taints that the pod tolerates, as in Kubernetes",
        "image_pull_policy": "When the image is pulled: Always, IfNotPresent or Never",
        "image_pull_secrets": "Secrets for pulling the image; names are enough",
        "security_context": "Security context of the container, as in Kubernetes",
        "labels": "Labels of the Job and its pod",
        "annotations": "Annotations of the Job and its pod",
        "timeout": "Seconds after which the Job is ended and the task fails, with error kind timeout",
        "pipes": "Lets the container report to the Dagster run with open_dagster_pipes, through the object store",
    },
    "duckdb": _SQL | _FILE,
    "ducklake": _SQL
    | {
        "catalog": "Catalog: a postgres credential, an address, or a DuckDB file; default: auth",
        "data_path": "Folder of the data files, in a bucket or on this machine",
        "catalog_name": "Name of the lake in the statements; default: lake",
        "metadata_schema": "Existing PostgreSQL schema for the tables of the catalog",
    },
    "gcs": _BUCKET,
    "http": {
        "url": "Address; relative to the credential's url if that has one",
        "method": "Method of the request; default: GET",
        "headers": "Headers of the request",
        "params": "Query parameters of the request",
        "json": "Body: mappings and lists are sent as JSON, text as it is",
        "form": "Fields of a form, sent as the body",
        "format": "Format of the body's rows: jsonl, csv or json; data is then a list of rows",
        "timeout": "Seconds to connect, and for each part of the response; default: 30",
        "verify_ssl": "Whether the server's certificate is checked; default: true",
        "follow_redirects": "Whether redirects are followed; default: true",
    },
    "mysql": _SERVER,
    "nats": {
        "operation": "publish, subscribe, kv_get, kv_put, kv_delete, kv_keys, object_put or object_get",
        "subject": "Subject of the message, or of the messages to read",
        "value": "Message or value: text as it is, anything else as JSON",
        "headers": "Headers of the message",
        "ack": "true waits until JetStream confirms the message",
        "bucket": "Key-value bucket or object store; a put creates a missing one",
        "key": "Key in the bucket",
        "prefix": "Beginning of the keys that kv_keys lists",
        "ttl": "Seconds that entries live in a bucket which this put creates",
        "stream": "JetStream stream to read; default: the one that has the subject",
        "start": "Sequence number of the first message; default: 1",
        "durable": "Name of a consumer; reading continues with the messages that it has not acknowledged",
        "max_messages": "Number of messages after which reading ends",
        "timeout": "Seconds without a message after which reading ends; default: 5",
    },
    "noop": {"result": "The result of the task"},
    "playbook": {
        "path": "File, catalog path, or registered playbook (path@2, path@latest)",
        "version": "Registered version of the playbook",
        "return_step": "Step of the child whose result is returned; default: its last result",
        "timeout": "Seconds after which the child is cancelled and the task fails",
    },
    "postgres": _SERVER
    | {"key": "Unique column that is not null; rows are ordered by it, and a restarted call continues after the last"},
    "python": {
        "code": "Python code; the keys of input are its variables",
        "script": _SCRIPT,
        "libs": "Modules to import: a list, or a mapping of aliases",
        "isolation": "thread, or subprocess for a process of its own; default: NOETL_PYTHON_ISOLATION",
        "memory": "Limit of the address space of a subprocess: bytes, or text such as 512m",
        "timeout": "Seconds after which the call fails, with error kind timeout; a subprocess is killed",
    },
    "resolve": _ARTIFACT,
    "result": _ARTIFACT,
    "s3": _BUCKET,
    "script": _SHELL,
    "secrets": {
        "provider": "Store of the secret; default: env",
        "secret": "Name of the secret",
        "path": "Name of the secret, as a path",
        "key": "Field of the secret",
    },
    "shell": _SHELL,
    "snowflake": _SERVER,
    "spark": {
        "command": "Spark SQL; every input is a view, and the rows of the last statement are the result",
        "code": "PySpark code that defines main or sets result",
        "function": "Function to call, as file.py:name",
        "script": _SCRIPT,
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
    "sqlite": _SERVER | _FILE,
    "transfer": {
        "source": "Where the rows come from: {kind, ...}",
        "target": "Where the rows go to: {kind, ...}",
        "mode": "append, replace, or upsert by key; default: append for tables, replace for files and objects",
        "key": "Unique columns for upsert",
        "on_drift": "What happens with columns that the target lacks; default: error",
        "verify": "What is compared after writing: rows (default), checksum or none",
        "resumable": "Whether rows are staged, so that a restarted command continues; default: auto",
        "chunk_size": "Maximum of rows in a chunk; of a folder, rows of a part (500,000)",
    },
    "workbook": {"task": "Name of the task in the playbook's workbook"},
}
"""By kind and canonical field name."""
