"""Runs what a page shows: it writes the files, runs the commands, and compares the output.

A block ````` ```yaml title="squares.yaml" ````` is a file of the reader's folder. A block ````` ```console ````` has commands after
``$ `` and their output. In the output, ``...`` stands for any text, and a line of it for any lines. A comment ``# exit code 1``
belongs to a command that fails. ``EXECUTION_ID`` in a command is the id that was printed last. With
``title="second terminal"`` the command runs until the end, and the page goes on when its output is there.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests import forked
from tests.waiting import PROCESS_SECONDS, until_now

BLOCK = re.compile(r"^( *)```(\w+)([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r'title="([^"]+)"')
CODE = re.compile(r"\s+# exit code (\d+)$")
EXECUTION = re.compile(r"execution (\d{12,})")
QUOTED = re.compile(r"'[^']*'|\"[^\"$`\\]*\"")
SHELL = set("|&;<>()$`*?[]{}~\n")
"""Outside quotes, characters for which a command needs a shell. Others run in a forked process, which starts faster."""

COLUMNS = "100"
HERE = "--- variables ---"


@dataclass(slots=True)
class Command:
    """A command of a page, and the output that the page shows."""

    line: str
    output: list[str] = field(default_factory=list)
    code: int = 0
    stays: bool = False


@dataclass(slots=True)
class Shown:
    """A file that a page shows."""

    name: str
    text: str


def shown(page: str) -> Iterator[Command | Shown]:
    """Yields the files and commands of a page in their order."""
    for indent, language, options, text in BLOCK.findall(page):
        body = re.sub(rf"^{indent}", "", text, flags=re.MULTILINE)
        title = TITLE.search(options)
        if language == "console":
            for command in _commands(body):
                command.stays = title is not None
                yield command
        elif title is not None:
            yield Shown(title[1], body)


def _commands(body: str) -> Iterator[Command]:
    command: Command | None = None
    for line in body.splitlines():
        if command is not None and command.line.endswith("\\") and not command.output:
            command.line = f"{command.line[:-1].rstrip()} {line.strip()}"
        elif line.startswith("$ "):
            if command is not None:
                yield command
            command = Command(line.removeprefix("$ "))
        elif command is not None:
            command.output.append(line.rstrip())
        if command is not None and (code := CODE.search(command.line)):
            command.line, command.code = command.line[: code.start()], int(code[1])
    if command is not None:
        yield command


def matches(expected: list[str], printed: str) -> bool:
    """Reports whether an output is what a page shows, whatever the width of its columns."""
    lines = [" ".join(line.split()) for line in expected]
    while lines and not lines[-1]:
        lines.pop()
    pattern = ""
    for line in lines:
        if line == "...":
            pattern += r"(?:.*\n)*?"
        else:
            pattern += ".*?".join(map(re.escape, line.split("..."))) + r" ?\n"
    text = "\n".join(" ".join(line.split()) for line in printed.splitlines()) + "\n"
    return re.fullmatch(pattern + r"\s*", text) is not None


class Reader:
    """Follows a page in a folder, as a reader does.

    Args:
        environment: variables of the commands.
        texts: folder for what forked commands print.
        replaced: texts of the page, such as ports, and what they are in this test.
    """

    def __init__(
        self, folder: Path, environment: Mapping[str, str], texts: Path, replaced: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.replaced = replaced or {}
        self.staying: list[forked.Forked] = []
        self.environment = {**environment, "COLUMNS": COLUMNS, "TERM": "dumb", "NO_COLOR": "1"}
        self.texts = texts
        self.execution_id = ""

    def follow(self, page: Path) -> int:
        """Does what a page says, and returns the number of its commands.

        Raises:
            AssertionError: a command prints something else, or exits with another code.
        """
        count = 0
        for one in shown(self.here(page.read_text(encoding="utf-8"))):
            if isinstance(one, Shown):
                path = self.folder / one.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(one.text, encoding="utf-8")
                continue
            count += 1
            line = one.line.replace("EXECUTION_ID", self.execution_id or "EXECUTION_ID")
            if one.stays:
                self.stay(line, one.output)
                continue
            code, printed = self.run(line)
            assert code == one.code, f"{page.name}: $ {line}\nexited with {code}:\n{printed}"
            if found := EXECUTION.findall(printed):
                self.execution_id = found[-1]
            if one.output:
                expected = "\n".join(one.output)
                assert matches(one.output, printed), (
                    f"{page.name}: $ {line}\nprinted:\n{printed}\nexpected:\n{expected}"
                )
        return count

    def here(self, text: str) -> str:
        """Returns a text of a page with the ports and addresses of this test."""
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        return text

    def run(self, line: str) -> tuple[int, str]:
        """Runs one command and returns its exit code and everything that it printed."""
        if line.startswith(("export ", 'eval "$(')):
            return self._set(line), ""
        words = shlex.split(line) if not SHELL & set(QUOTED.sub("", line)) else []
        if words and words[0] == "cd":
            self.folder = (self.folder / words[1]).resolve()
            return 0, ""
        if words and words[0] in forked.MAINS:
            output = self.texts / "output.txt"
            output.write_text("")
            program = forked.Forked(*words, environment=self.environment, folder=self.folder, output=output)
            return program.wait(PROCESS_SECONDS), output.read_text()
        done = self._shell(line)
        return done.returncode, done.stdout

    def _shell(self, line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", line],
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PROCESS_SECONDS,
            check=False,
        )

    def _set(self, line: str) -> int:
        """Sets variables for the commands that follow."""
        done = self._shell(f"{line}; code=$?; echo; echo {HERE}; env -0; exit $code")
        printed = done.stdout.partition(f"{HERE}\n")[2]
        self.environment |= dict(one.split("=", 1) for one in printed.split("\0") if "=" in one)
        return done.returncode

    def stay(self, line: str, expected: list[str]) -> None:
        """Starts a command in the second terminal, and waits until it has printed what the page shows."""
        output = self.texts / f"terminal-{len(self.staying)}.txt"
        output.touch()
        program, *arguments = shlex.split(line)
        started = forked.Forked(program, *arguments, environment=self.environment, folder=self.folder, output=output)
        self.staying.append(started)
        until_now(lambda: matches(expected, output.read_text()) or started.poll() is not None, line)
        assert started.poll() is None, f"$ {line}\nended:\n{output.read_text()}"

    def leave(self) -> None:
        """Ends what still runs in the second terminal."""
        for one in self.staying:
            one.kill()


def with_programs(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Returns an environment in which the shell finds the programs of a folder first."""
    return {**environment, "PATH": f"{folder}{os.pathsep}{environment.get('PATH', os.defpath)}"}
