"""What this project asks of a Dockerfile beyond hadolint's rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.image.dockerfile import Dockerfile, Stage, expand, pairs

PUBLISHED = ("platform", "spark", "worker")
LABELS = ("title", "description", "source", "documentation", "licenses", "vendor", "version", "revision")
_PINNED = re.compile(r"@sha256:[0-9a-f]{64}$|:[\w.]*-?\d{8}(-\w+)?$|:\d+\.\d+\.\d+[\w.-]*$")
_SECRET = re.compile(r"(PASSWORD|SECRET|TOKEN|CREDENTIAL|API_?KEY|ACCESS_?KEY)", re.IGNORECASE)


def complaints(dockerfile: Dockerfile) -> list[str]:
    """A sentence for each rule that a stage breaks; those of the file itself first."""
    return [*_of_secrets(dockerfile)] + [
        f"{stage.name}: {what}"
        for stage in dockerfile.stages.values()
        for rule in (_of_base, _of_forms, _of_copies, _of_end)
        for what in rule(dockerfile, stage)
    ]


def environment(dockerfile: Dockerfile, name: str) -> dict[str, str]:
    """What ENV sets in a stage, with those before it."""
    found: dict[str, str] = {}
    for stage in dockerfile.line_of(name):
        for one in stage.instructions:
            if one.keyword == "ENV":
                found |= pairs(expand(one.text, found))
    return found


def labels(dockerfile: Dockerfile, name: str) -> dict[str, str]:
    """The labels of a stage, with those before it; arguments have their defaults."""
    found: dict[str, str] = {}
    arguments = dict(dockerfile.arguments)
    for stage in dockerfile.line_of(name):
        for one in stage.instructions:
            if one.keyword == "ARG" and "=" in one.text:
                arguments |= pairs(one.text)
            if one.keyword == "LABEL":
                found |= pairs(expand(one.text, arguments))
    return found


def last(dockerfile: Dockerfile, name: str, keyword: str) -> str | None:
    """The text of a stage's latest instruction of a kind, those before it included."""
    texts = [one.text for stage in dockerfile.line_of(name) for one in stage.instructions if one.keyword == keyword]
    return texts[-1] if texts else None


def _of_secrets(dockerfile: Dockerfile) -> Iterator[str]:
    for name in dockerfile.arguments:
        if _SECRET.search(name):
            yield f"the argument {name} would be kept in the image's history"
    for stage in dockerfile.stages.values():
        for one in stage.instructions:
            if one.keyword in ("ENV", "ARG"):
                for name in [*pairs(one.text), one.text]:
                    if _SECRET.search(name.partition("=")[0]):
                        yield f"{stage.name}: {name.partition('=')[0]} would be kept in the image"
                        break
            if re.search(r"://[^/\s]+:[^/\s]+@", one.text):
                yield f"{stage.name}: line {one.line} holds an address with a login"


def _of_base(dockerfile: Dockerfile, stage: Stage) -> Iterator[str]:
    if stage.base not in dockerfile.stages and not _PINNED.search(stage.base):
        yield f"its base {stage.base} is not pinned"


def _of_forms(dockerfile: Dockerfile, stage: Stage) -> Iterator[str]:
    for one in stage.instructions:
        command = one.text.partition("CMD ")[2] if one.keyword == "HEALTHCHECK" else one.text
        if one.keyword in ("ENTRYPOINT", "CMD", "HEALTHCHECK") and command and not command.startswith("["):
            yield f"{one.keyword} of line {one.line} starts a shell, which keeps signals for itself"


def _of_copies(dockerfile: Dockerfile, stage: Stage) -> Iterator[str]:
    for one in stage.instructions:
        if one.keyword == "ADD":
            yield f"ADD of line {one.line} does more than COPY"
        if one.keyword == "COPY" and one.text.split()[0] in (".", "./"):
            yield f"COPY of line {one.line} takes whatever lies there"


def _of_end(dockerfile: Dockerfile, stage: Stage) -> Iterator[str]:
    if stage.name not in PUBLISHED:
        return
    user = last(dockerfile, stage.name, "USER") or "root"
    if not re.fullmatch(r"[1-9]\d*:[1-9]\d*", user):
        yield f"it ends as user {user}; Kubernetes checks runAsNonRoot by number"
    for keyword in ("ENTRYPOINT", "CMD", "HEALTHCHECK", "WORKDIR"):
        if last(dockerfile, stage.name, keyword) is None:
            yield f"it has no {keyword}"
    known = labels(dockerfile, stage.name)
    for name in LABELS:
        if not known.get(f"org.opencontainers.image.{name}"):
            yield f"it has no label org.opencontainers.image.{name}"
