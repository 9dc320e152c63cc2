"""Models the pod that a playbook requests for a run or a step."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from noetl_dagster.playbook.fields import Model, Spelled

GPU = "nvidia.com/gpu"
"""The resource that ``gpu: 1`` asks for."""


def _as_text(value: Any) -> Any:
    """Returns a number or a boolean as it is written: Kubernetes takes texts alone."""
    return str(value).lower() if isinstance(value, bool | int | float) else value


def _with_texts(toleration: dict[str, Any]) -> dict[str, Any]:
    return {key: value if key == "tolerationSeconds" else _as_text(value) for key, value in toleration.items()}


Texts = dict[str, Annotated[str, BeforeValidator(_as_text)]]
Toleration = Annotated[dict[str, Any], AfterValidator(_with_texts)]


class Amount(Model):
    """The amount of a resource that is reserved, and the most that is allowed."""

    request: Annotated[str | None, Spelled("requests")] = None
    limit: Annotated[str | None, Spelled("limits")] = None


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
    gpu: dict[str, Annotated[int, Field(ge=0)]] = Field(
        default_factory=dict, description=f"whole devices: 1 of {GPU}, or {{resource: number}}"
    )
    node_selector: Annotated[Texts, Spelled("nodeSelector")] = Field(
        default_factory=dict, description="labels that the node must have"
    )
    tolerations: tuple[Toleration, ...] = Field((), description="taints of nodes, as in Kubernetes")
    service_account: Annotated[str | None, Spelled("serviceAccount", "service_account_name", "serviceAccountName")] = (
        Field(None, description="service account that the pod runs as")
    )
    env: Texts = Field(default_factory=dict, description="environment variables; secrets go by env_from")
    env_secrets: tuple[str, ...] = Field((), description="secrets whose keys become variables")
    env_config_maps: tuple[str, ...] = Field((), description="config maps, likewise")
    labels: Texts = Field(default_factory=dict, description="labels of the pod")
    annotations: Texts = Field(default_factory=dict, description="annotations of the pod")
    priority_class: Annotated[str | None, Spelled("priorityClass", "priority_class_name", "priorityClassName")] = Field(
        None, description="priority class of the pod"
    )

    def under(self, inner: Pod) -> Pod:
        """This pod with what ``inner`` says instead; mappings are laid together, all else is replaced."""
        merged = dict(self)
        for name, value in inner:
            if isinstance(value, dict) and name != "gpu":
                merged[name] = {**merged[name], **value}
            elif value:
                merged[name] = value
        return Pod(**merged)
