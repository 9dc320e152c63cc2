"""The runner of pages notices what is wrong with a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pages.console import Command, Reader, Shown, matches, shown

PAGE = """
```yaml title="a.yaml"
a: 1
```

```console
$ cat a.yaml
a: 1
$ echo execution 123456789012 \\
      done
execution ... done
$ echo EXECUTION_ID; false   # exit code 1
123456789012
```
"""


def test_a_page_is_read() -> None:
    assert list(shown(PAGE)) == [
        Shown("a.yaml", "a: 1\n"),
        Command("cat a.yaml", ["a: 1"]),
        Command("echo execution 123456789012 done", ["execution ... done"]),
        Command("echo EXECUTION_ID; false", ["123456789012"], 1),
    ]


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        (["a", "b"], "a\nb\n", True),
        (["a  b"], "  a  b  \n", True),
        (["a", "...", "d"], "a\nb\nc\nd\n", True),
        (["a", "...", "d"], "a\nd\n", True),
        (["took ... s"], "took 0.1 s\n", True),
        (["a"], "a\nb\n", False),
        (["took ... s"], "took\n0.1 s\n", False),
        (["a.b"], "aab\n", False),
    ],
)
def test_output_is_compared(expected: list[str], printed: str, same: bool) -> None:
    assert matches(expected, printed) is same


def test_a_page_is_followed(reader: Reader, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    assert reader.follow(page) == 3
    page.write_text("```console\n$ echo a\nb\n```\n")
    with pytest.raises(AssertionError, match="printed:\na\n"):
        reader.follow(page)
    page.write_text("```console\n$ false\n```\n")
    with pytest.raises(AssertionError, match="exited with 1"):
        reader.follow(page)
