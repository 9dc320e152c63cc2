"""Checks the English of the documentation: words to avoid, and long sentences.

Pages that are made from the code contain the texts of the command line, the settings, the Python API and the chart.
Code is not checked.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PROJECT = Path(__file__).parents[1]
PLACES = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/*.md", "helm/**/*.md", ".github/**/*.md")

MOST_WORDS = 40
AVOIDED = {
    r"[Nn]obody|[Ww]hoever": "name the subject, or use 'if'",
    r"(?:^|[.;] )(?:Who|who|What) (?!is |are |it |you |to |happens )\w+ [^?]*?[.;]": "use 'if you' or 'when'",
    r"stands? (?:in|at|on|there|beside|elsewhere)|stand (?:in|for what)": "is stored, is in, is on",
    r"(?:is|are|was|were) away": "is unavailable",
    r"(?:goes|go|went|going) on\b(?! to\b)": "resumes, continues",
    r"gives? back|gave back": "returns, releases",
    r"says? (?:what|which|where|who)|tells? (?:so|what|which|how|where|who|why)": "specifies, reports, shows",
    r"(?:^|[.;:] )Of (?:a|an|the|two|several|such|these|what)\b": "begin with the subject",
    r"of which|of whom|whose own": "write two sentences",
    r"that there (?:is|are)\b": "existing, available",
    r"nothing moves|does not count any ?more|as before any": "describe the effect",
    r"without a word": "silently",
    r"has to know|is to know": "needs",
    r"halls?|doors?|burie[sd]|bury": "no metaphors",
}
_AVOIDED = [
    (re.compile(pattern if "(?:^" in pattern else rf"\b(?:{pattern})\b"), remedy) for pattern, remedy in AVOIDED.items()
]
_FENCE = re.compile(r"^ *(```|~~~).*?^ *\1", re.MULTILINE | re.DOTALL)
_SENTENCE = re.compile(r"(?<=[.!?:;])\s+")


def complaints(text: str) -> Iterator[tuple[int, str]]:
    """Yields lines and what is wrong with them."""
    text = _FENCE.sub(lambda found: "\n" * found[0].count("\n"), text)
    text = re.sub(r"<!--.*?-->|<[^>\n]*>", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`", lambda found: "X" + "\n" * found[0].count("\n"), text)
    text = re.sub(r"\]\([^)\s]*\)", "]", text)
    for line, paragraph in _paragraphs(text):
        for pattern, remedy in _AVOIDED:
            for found in pattern.finditer(paragraph):
                before = paragraph[: found.start()].count("\n")
                yield line + before, f"{found[0].strip()!r}: {remedy}"
        if "|" in paragraph:
            continue
        for sentence in _SENTENCE.split(paragraph):
            if len(words := sentence.split()) > MOST_WORDS:
                yield line, f"a sentence of {len(words)} words: {' '.join(words[:6])} ..."


def _paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Yields paragraphs, items of lists and rows of tables with the numbers of their first lines."""
    begun, lines = 1, list[str]()
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if not line.strip() or re.match(r"\s*(?:[-*|#>]|\d+\.) ?", line):
            if lines:
                yield begun, "\n".join(lines)
            begun, lines = number, []
        if line.strip():
            lines.append(line.strip())
            begun = begun if len(lines) > 1 else number


def main(names: Iterable[str]) -> int:
    """Checks the files with these names, or all; returns the exit code."""
    files = sorted({path for place in PLACES for path in PROJECT.glob(place)})
    found = 0
    for path in [Path(name) for name in names] or files:
        name = str(path.resolve().relative_to(PROJECT))
        for line, complaint in complaints(path.read_text(encoding="utf-8")):
            print(f"{name}:{line}: {complaint}")
            found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
