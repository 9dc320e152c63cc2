"""Models the pod that a playbook requests for a run or a step."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from noetl_dagster.playbook.fields import Model, Spelled

GPU = "nvidia.com/gpu"
"""The resource that ``gpu: 1`` asks for."""


PULL_POLICIES = ("Always", "IfNotPresent", "Never")
OPERATORS = ("Exists", "Equal")
EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")


class Amount(Model):
    """The amount of a resource that is reserved, and the most that is allowed."""

    request: str | None = None
    limit: str | None = None


class Pod(Model):
    """A pod, as far as a playbook chooses it; the rest comes from where runs are launched."""

    image: str | None = Field(None, description="image of the container; None: that of the code location")
    image_pull_policy: Annotated[str | None, Spelled("imagePullPolicy")] = Field(
        None, description="Always, IfNotPresent or Never"
    )
    cpu: Amount | None = Field(None, description="cores: '500m', 2, or {request, limit}")
    memory: Amount | None = Field(None, description="'4Gi', or {request, limit}")
    ephemeral_storage: Annotated[Amount | None, Spelled("ephemeral-storage", "ephemeralStorage")] = Field(
        None, description="of the node's disk: '20Gi', or {request, limit}"
    )
    gpu: dict[str, int] | None = Field(None, description=f"whole devices: 1 of {GPU}, or {{resource: number}}")
    node_selector: Annotated[dict[str, str] | None, Spelled("nodeSelector")] = Field(
        None, description="labels that the node must have"
    )
    tolerations: tuple[dict[str, Any], ...] | None = Field(
        None, description="taints of nodes that are no hindrance: {key, operator, value, effect}"
    )
    service_account: Annotated[str | None, Spelled("serviceAccount", "service_account_name", "serviceAccountName")] = (
        Field(None, description="service account that the pod runs as")
    )
    env: dict[str, str] | None = Field(None, description="environment variables; secrets go by env_from")
    env_secrets: tuple[str, ...] | None = Field(None, description="secrets whose keys become variables")
    env_config_maps: tuple[str, ...] | None = Field(None, description="config maps, likewise")
    labels: dict[str, str] | None = Field(None, description="labels of the pod")
    annotations: dict[str, str] | None = Field(None, description="annotations of the pod")
    priority_class: Annotated[str | None, Spelled("priorityClass", "priority_class_name", "priorityClassName")] = Field(
        None, description="priority class of the pod"
    )

    def under(self, inner: Pod) -> Pod:
        """This pod with what ``inner`` says instead; mappings are laid together, all else is replaced."""
        merged = dict(self)
        for name, value in inner:
            if isinstance(merged[name], dict) and isinstance(value, dict) and name != "gpu":
                merged[name] = {**merged[name], **value}
            elif value is not None:
                merged[name] = value
        return Pod(**merged)
