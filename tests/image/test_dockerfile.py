"""What the Dockerfile says: linted, by this project's own rules, and of the packages that the lock names."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from noetl_dagster.settings import Settings
from tests.image.dockerfile import PUBLISHED, context_files, environment, labels, last, pairs, read_dockerfile

PROJECT = Path(__file__).parents[2]
DOCKERFILE = PROJECT / "Dockerfile"
EXTRAS = ("k8s", "gcs", "google", "connect", "tracing")
"""What the image has beside the package's own dependencies."""
LABELS = ("title", "description", "source", "documentation", "licenses", "vendor", "version", "revision")
SECRET = re.compile(r"(PASSWORD|SECRET|TOKEN|CREDENTIAL|API_?KEY|ACCESS_?KEY)", re.IGNORECASE)


def test_hadolint_has_nothing_to_say() -> None:
    said = _hadolint(DOCKERFILE)

    assert said == ""
    ignored = re.findall(r"hadolint ignore=(\S+)", DOCKERFILE.read_text())
    assert set(ignored) == {"DL3008"}  # versions of Debian's packages: the archive's day pins them


def test_hadolint_would_speak(tmp_path: Path) -> None:
    changed = tmp_path / "Dockerfile"
    changed.write_text(DOCKERFILE.read_text().replace("--no-install-recommends", ""))

    assert "DL3015" in _hadolint(changed)


def test_published_images_hold_no_secret_and_say_what_they_are() -> None:
    """What hadolint does not know: history keeps arguments and variables, and Kubernetes checks users by number."""
    dockerfile = read_dockerfile(DOCKERFILE)
    assert not [name for name in dockerfile.arguments if SECRET.search(name)]
    assert not re.search(r"://[^/\s]+:[^/\s]+@", DOCKERFILE.read_text())
    for stage in dockerfile.stages.values():
        set_here = [one.text for one in stage.instructions if one.keyword in ("ENV", "ARG")]
        assert not [name for text in set_here for name in (*pairs(text), text.partition("=")[0]) if SECRET.search(name)]
    for name in PUBLISHED:
        assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", last(dockerfile, name, "USER") or "root"), name
        assert all(last(dockerfile, name, keyword) for keyword in ("ENTRYPOINT", "CMD", "HEALTHCHECK", "WORKDIR"))
        assert {f"org.opencontainers.image.{label}" for label in LABELS} <= labels(dockerfile, name).keys()


def test_the_layout_is_what_the_chart_counts_on() -> None:
    dockerfile = read_dockerfile(DOCKERFILE)
    variables = environment(dockerfile, "platform")

    assert variables["PATH"].split(":")[0] == "/opt/noetl/.venv/bin"
    assert variables["DAGSTER_HOME"] == "/opt/noetl/dagster"
    assert variables["NOETL_HOME"] == "/var/lib/noetl"
    assert variables["NOETL_PLAYBOOKS_PATH"] == "/opt/noetl/playbooks"
    assert variables["NOETL_EMBEDDED"] == "false"
    assert variables["JAVA_HOME"]
    assert last(dockerfile, "platform", "USER") == "10001:10001"
    assert last(dockerfile, "platform", "WORKDIR") == "/opt/noetl"
    assert last(dockerfile, "spark", "ENTRYPOINT") == '["/opt/entrypoint.sh"]'  # where Spark looks for it


def test_users_of_a_cluster_write_where_a_process_has_to() -> None:
    """OpenShift's are in group 0, and in no other."""
    made = [line for line in DOCKERFILE.read_text().splitlines() if "install --directory" in line and "--owner" in line]
    assert {folder for line in made for folder in line.split() if folder.startswith("/")} == {
        "/var/lib/noetl",
        "/opt/noetl/dagster",
        "/opt/spark/work-dir",
    }
    assert all("--group=0 --mode=0775 " in line for line in made)


def test_what_it_sets_is_what_settings_read() -> None:
    """A variable that nobody reads would be a misspelt one."""
    read = {f"NOETL_{name.upper()}" for name in Settings.model_fields}
    dockerfile = read_dockerfile(DOCKERFILE)

    for stage in PUBLISHED:
        ours = {name for name in environment(dockerfile, stage) if name.startswith("NOETL_")}
        assert ours <= read


def test_the_version_is_that_of_the_package() -> None:
    dockerfile = read_dockerfile(DOCKERFILE)

    for stage in PUBLISHED:
        assert labels(dockerfile, stage)["org.opencontainers.image.version"] == _project()["version"]
    assert f"noetl-dagster:{_project()['version']} " in DOCKERFILE.read_text()


def test_the_context_holds_what_is_copied_and_little_else() -> None:
    files = context_files(PROJECT, PROJECT / ".dockerignore")

    copied = {
        origin
        for stage in read_dockerfile(DOCKERFILE).stages.values()
        for one in stage.instructions
        if one.keyword == "COPY" and "from" not in one.flags
        for origin in one.text.split()[:-1]
    }
    for origin in copied:
        assert any(path.is_relative_to(origin) for path in files), f"{origin} does not reach the builder"
    for path in files:
        assert any(path.is_relative_to(origin) for origin in copied), f"{path} is sent for nothing"
        assert path.suffix != ".pyc"
    assert Path("noetl_dagster/settings.py") in files


def test_the_image_has_the_locks_versions() -> None:
    """The same packages and hashes as the checkout that the tests run in."""
    whole, image = _lock("requirements.lock"), _lock("requirements-image.lock")

    different = {name: version for name, version in image.items() if whole.get(name) != version}
    assert different == {}, "pyproject.toml and the locks have come apart: make lock"


def test_the_image_has_all_that_it_needs_and_nothing_of_development() -> None:
    project = _project()
    optional = project["optional-dependencies"]
    image = _lock("requirements-image.lock")

    for text in [*project["dependencies"], *(one for extra in EXTRAS for one in optional[extra])]:
        wanted = Requirement(text)
        version, _ = image[canonicalize_name(wanted.name)]
        assert version in wanted.specifier, f"{text}: make lock"
    for text in [*optional["embedded"], *optional["dev"]]:
        assert canonicalize_name(Requirement(text).name) not in image, f"{text} is not for the image"


def test_what_builds_the_image_is_pinned_too() -> None:
    builders = _lock("requirements-build.lock")

    setup = (PROJECT / "scripts/setup").read_text()
    assert f"uv=={builders['uv'][0]}" in setup  # make setup and the image install with the same
    assert {"hatchling", "setuptools", "wheel"} <= set(builders)
    backend = Requirement(tomllib.loads((PROJECT / "pyproject.toml").read_text())["build-system"]["requires"][0])
    assert builders["hatchling"][0] in backend.specifier


@pytest.mark.parametrize("name", ["requirements.lock", "requirements-image.lock", "requirements-build.lock"])
def test_every_package_has_its_hashes(name: str) -> None:
    for package, (version, hashes) in _lock(name).items():
        assert version, package
        assert hashes, package


def _hadolint(path: Path) -> str:
    program = Path(sys.executable).parent / "hadolint"
    done = subprocess.run([program, "--no-color", path], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def _project() -> dict[str, object]:
    return tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]


def _lock(name: str) -> dict[str, tuple[str, frozenset[str]]]:
    """The packages of a lock: version and hashes."""
    text = (PROJECT / name).read_text()
    return {
        canonicalize_name(package): (version, frozenset(re.findall(r"sha256:(\w{64})", rest)))
        for package, version, rest in re.findall(
            r"^([\w.-]+)(?:\[[\w,]+\])?==(\S+)(.*?)(?=^[\w.-]+(?:\[|==)|\Z)", text, re.MULTILINE | re.DOTALL
        )
    }
