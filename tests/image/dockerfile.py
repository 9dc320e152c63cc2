"""Reads a Dockerfile into stages of instructions, and a .dockerignore into the files of a build."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PUBLISHED = ("platform", "spark", "worker")
"""The stages that become images."""

_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::-([^}]*))?\})")


@dataclass(frozen=True)
class Instruction:
    """``keyword`` in capitals, ``flags`` as ``--from=build`` gives them, the rest in ``text``; ``line`` from 1."""

    line: int
    keyword: str
    flags: Mapping[str, str]
    text: str

    @property
    def exec_form(self) -> list[str] | None:
        """The words of a JSON array; None for the shell form."""
        return json.loads(self.text) if self.text.startswith("[") else None


@dataclass
class Stage:
    """One FROM with what follows it."""

    name: str
    base: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Dockerfile:
    """``arguments`` are those before the first FROM, with their defaults."""

    arguments: dict[str, str]
    stages: dict[str, Stage]

    def line_of(self, name: str) -> list[Stage]:
        """The stages that a stage is built on, the first of them first, itself last."""
        chain = [self.stages[name]]
        while chain[0].base in self.stages:
            chain.insert(0, self.stages[chain[0].base])
        return chain


def read_dockerfile(path: Path) -> Dockerfile:
    """Its stages in order. Heredocs are not read: this project's file has none."""
    found = Dockerfile({}, {})
    stage: Stage | None = None
    for one in _instructions(path.read_text()):
        if one.keyword == "FROM":
            base, _, name = re.split(r"(\s+AS\s+)", one.text) if " AS " in one.text else (one.text, "", one.text)
            stage = Stage(name, expand(base, found.arguments))
            found.stages[name] = stage
        elif stage is None:
            assert one.keyword == "ARG", f"line {one.line}: {one.keyword} before FROM"
            name, _, default = one.text.partition("=")
            found.arguments[name] = default
        else:
            stage.instructions.append(one)
    return found


def expand(text: str, values: Mapping[str, str]) -> str:
    """``$NAME``, ``${NAME}`` and ``${NAME:-default}`` replaced; what is not known is empty."""
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2]) or match[3] or "", text)


def pairs(text: str) -> dict[str, str]:
    """``A=1 B="two words"`` of ENV and LABEL."""
    return {name: quoted or plain for name, quoted, plain in re.findall(r'([\w.]+)=(?:"([^"]*)"|(\S*))', text)}


def _instructions(text: str) -> Iterator[Instruction]:
    logical, begun = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (logical or line.strip()):
            continue
        begun = begun if logical else number
        logical += line.removesuffix("\\") if line.endswith("\\") else line
        if line.endswith("\\"):
            continue
        keyword, _, rest = logical.partition(" ")
        flags = {}
        rest = rest.strip()
        while keyword != "RUN" and (match := re.match(r"--([\w-]+)=(\S+)\s+", rest)):
            flags[match[1]] = match[2]
            rest = rest[match.end() :]
        yield Instruction(begun, keyword.upper(), flags, rest)
        logical = ""


def context_files(folder: Path, ignore: Path) -> list[Path]:
    """The files below ``folder`` that ``.dockerignore`` lets through, relative; the last pattern that fits decides."""
    patterns = [
        (line.startswith("!"), _pattern(line.removeprefix("!")))
        for line in ignore.read_text().splitlines()
        if line and not line.startswith("#")
    ]
    tops = [re.compile(f"{_glob(line[1:])}(/|$)") for line in ignore.read_text().splitlines() if line[:1] == "!"]
    found = []
    for path in sorted(_walk(folder, folder, tops)):
        taken = True
        for inclusion, pattern in patterns:
            if pattern.match(path.as_posix()):
                taken = inclusion
        if taken:
            found.append(path)
    return found


def _walk(root: Path, folder: Path, tops: list[re.Pattern[str]]) -> Iterator[Path]:
    """Files below a folder, without entering what no inclusion can reach (environments, caches, data)."""
    for path in folder.iterdir():
        relative = path.relative_to(root)
        if path.is_dir() and not path.is_symlink():
            inside = any(top.match(f"{relative}/") for top in tops)
            above = any(top.pattern.startswith(f"{_glob(str(relative))}/") for top in tops)
            if inside or above:
                yield from _walk(root, path, tops)
        else:
            yield relative


def _pattern(line: str) -> re.Pattern[str]:
    """Fits a path, and all that is below it."""
    return re.compile(f"{_glob(line.strip('/'))}(/.*)?$")


def _glob(line: str) -> str:
    parts = re.split(r"(\*\*/|\*|\?)", line)
    meaning = {"**/": "(.*/)?", "*": "[^/]*", "?": "[^/]"}
    return "".join(meaning.get(part, re.escape(part)) for part in parts)


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
