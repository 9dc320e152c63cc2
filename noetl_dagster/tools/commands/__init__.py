"""``kind: shell``, also ``script``, and ``kind: container``: their fields; programs, and Jobs in Kubernetes."""

from __future__ import annotations

from noetl_dagster.playbook.dialects.pod import check_types
from noetl_dagster.playbook.tool_kinds import FOLDER, SCRIPT, TIMEOUT, ToolKind

_SHELL = tuple(
    ToolKind(
        name,
        "noetl_dagster.tools.commands.shell:ShellTool",
        {
            ("cmds", "cmd", "command", "commands"): (
                "Commands that one shell runs in order, until one fails: text or a list"
            ),
            "code": "Text of a script",
            "script": SCRIPT,
            "args": "Arguments of the script",
            "interpreter": (
                "Program that runs the script; default: by its first line #!, then by the ending of its name"
            ),
            "shell": "Shell that runs cmds; default: /bin/sh",
            "env": "Further environment variables",
            FOLDER: "Working folder; default: the playbook's folder",
            TIMEOUT: "Seconds after which all processes of the call are killed and it fails, with error kind timeout",
            "pipes": (
                "Lets the processes report to the Dagster run with open_dagster_pipes: true through a file, "
                "objects through the object store"
            ),
        },
        needs=("cmds", "script", "code"),
        commands=("cmds", "args", "env"),
        sent=("env",),
        result=("exit_code", "stdout", "stderr", "truncated"),
        without_effect=("capture_output", "stream_output", "check", "job", "namespace"),
    )
    for name in ("script", "shell")
)
_CONTAINER: ToolKind = ToolKind(
    "container",
    "noetl_dagster.tools.commands.container:ContainerTool",
    {
        "image": "Image of the container",
        "command": "Command: text for /bin/sh -c, or a list",
        "script": SCRIPT,
        "args": "Arguments of the command",
        "env": "Environment variables; those with a secret are passed through a Secret of the Job",
        ("env_from", "envFrom"): "ConfigMaps and Secrets whose keys become variables, as in Kubernetes",
        "namespace": "Namespace of the Job; default: that of the process's own pod, else of the kubeconfig",
        "resources": "Requests and limits, as in Kubernetes",
        ("service_account", "serviceAccountName", "service_account_name", "serviceAccount"): (
            "Service account of the pod"
        ),
        ("working_dir", "workingDir", "workdir", "working_directory"): "Working folder in the container",
        "volumes": "Volumes of the pod, as in Kubernetes",
        ("volume_mounts", "volumeMounts"): "Mounts of the container, as in Kubernetes",
        ("node_selector", "nodeSelector"): "Labels that the node must have",
        "tolerations": "Taints that the pod tolerates, as in Kubernetes",
        ("image_pull_policy", "imagePullPolicy"): "When the image is pulled: Always, IfNotPresent or Never",
        ("image_pull_secrets", "imagePullSecrets"): "Secrets for pulling the image; names are enough",
        ("security_context", "securityContext"): "Security context of the container, as in Kubernetes",
        "labels": "Labels of the Job and its pod",
        "annotations": "Annotations of the Job and its pod",
        ("timeout", "timeoutSeconds", "activeDeadlineSeconds", *TIMEOUT[1:], "active_deadline_seconds"): (
            "Seconds after which the Job is ended and the task fails, with error kind timeout"
        ),
        "pipes": "Lets the container report to the Dagster run with open_dagster_pipes, through the object store",
    },
    needs=("image",),
    name_fills="name",
    below=("spec", "runtime"),
    commands=("command", "args", "env"),
    result=("job", "namespace", "pod", "exit_code", "stdout"),
    extra="k8s",
    without_effect=(
        *("provider", "cleanup", "backoffLimit", "backoff_limit", "files", "ttlSecondsAfterFinished"),
        *("ttl_seconds", "ttl_seconds_after_finished", "remote", "restart_policy", "restartPolicy"),
    ),
    check=lambda block, config: check_types(block, _CONTAINER.spellings.values()),
)
KINDS = (*_SHELL, _CONTAINER)
