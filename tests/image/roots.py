"""Builds the stages of a Dockerfile without a container engine, and starts what is in them.

A root is a stack of folders under an overlay, mounted in a namespace of the one process that needs it: nothing stays
mounted. RUN is run by the stage's own shell below ``chroot``, COPY copies, the other instructions change what the next
one finds. Needs root, and Linux. What a container engine adds to it, layers and their archive, is not tried.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.image.dockerfile import Dockerfile, Instruction, context_files, expand, pairs

SUITE = "trixie"
MIRROR = "http://deb.debian.org/debian"
PASSES_THROUGH = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
AUTHORITIES = Path("/etc/ssl/certs/ca-certificates.crt")

SOURCES = """\
Types: deb
URIs: http://deb.debian.org/debian
Suites: trixie trixie-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://deb.debian.org/debian-security
Suites: trixie-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""
SLIM = "".join(f"path-exclude /usr/share/{part}/*\n" for part in ("doc", "info", "linda", "lintian", "locale", "man"))
"""Debian's slim images leave these out, which some packages have not expected."""


@dataclass(frozen=True)
class Image:
    """A root and what a container of it would be started with. ``layers`` are folders, the topmost first."""

    layers: tuple[Path, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    shell: tuple[str, ...] = ("/bin/sh", "-c")
    workdir: str = "/"
    user: str = "0:0"
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()


def build(
    dockerfile: Dockerfile, target: str, context: Path, base: Path, folder: Path, built: dict[str, Image]
) -> Image:
    """Runs all steps of a stage, and those of the stages that it needs and that ``built`` does not have yet.

    Args:
        base: root of a small Debian, which takes the place of the base image.
        folder: takes a folder for each stage.

    Raises:
        AssertionError: a step failed; with its line and what it printed.
    """
    for stage in dockerfile.line_of(target):
        if stage.name in built:
            continue
        under = built[stage.base] if stage.base in built else Image((base,), arguments=dockerfile.arguments)
        own = folder / stage.name
        own.mkdir()
        image = replace(under, layers=(own, *under.layers))
        for step in stage.instructions:
            origin = step.flags.get("from")
            if origin and origin not in built:
                build(dockerfile, origin, context, base, folder, built)
            image = _step(image, step, dockerfile, context, built)
        built[stage.name] = image
    return built[target]


def _step(image: Image, step: Instruction, dockerfile: Dockerfile, context: Path, built: Mapping[str, Image]) -> Image:
    known = {**image.arguments, **image.environment}
    match step.keyword:
        case "ARG":
            name, _, default = step.text.partition("=")
            value = default or image.arguments.get(name) or dockerfile.arguments.get(name, "")
            return replace(image, arguments={**image.arguments, name: value})
        case "ENV":
            return replace(image, environment={**image.environment, **pairs(expand(step.text, known))})
        case "WORKDIR":
            _inside(image, ["mkdir", "-p", step.text], what=step, environment={})
            return replace(image, workdir=step.text)
        case "SHELL":
            return replace(image, shell=tuple(step.exec_form or ()))
        case "USER":
            return replace(image, user=step.text)
        case "ENTRYPOINT":
            return replace(image, entrypoint=tuple(step.exec_form or ()), command=())
        case "CMD":
            return replace(image, command=tuple(step.exec_form or ()))
        case "RUN":
            _inside(image, [*image.shell, step.text], what=step, environment=known)
        case "COPY":
            _copy(image, step, context, built)
        case "LABEL" | "EXPOSE" | "HEALTHCHECK":
            pass
        case other:
            raise AssertionError(f"line {step.line}: {other} is not known here")
    return image


def _copy(image: Image, step: Instruction, context: Path, built: Mapping[str, Image]) -> None:
    *origins, target = step.text.split()
    stage = step.flags.get("from")
    into = str(Path(image.workdir) / target) + ("/" if target.endswith("/") else "")
    lines = []
    for origin in origins:
        found = f"$origin/{origin.lstrip('/')}"
        whole = f'mkdir -p "$root{into}" && cp -a "{found}/." "$root{into}"'
        single = f'mkdir -p "$(dirname "$root{into}x")" && cp -a "{found}" "$root{into}"'
        lines.append(f'if [ -d "{found}" ]; then {whole}; else {single}; fi')
    script = "\n".join([*_mounted(image), *(_mounted(built[stage], "origin") if stage else []), *lines])
    _in_namespace(script, step, {} if stage else {"origin": str(context)})


def _mounted(image: Image, name: str = "root") -> list[str]:
    """Shell lines that mount a stack of layers; ``$root`` (or ``name``) is then where it is."""
    top, *lower = image.layers
    scratch = top.parent / f"{top.name}.{name}"
    for part in ("work", "mounted"):
        (scratch / part).mkdir(parents=True, exist_ok=True)
    stack = ":".join(map(str, lower))
    options = f"lowerdir={stack},upperdir={top},workdir={scratch}/work"
    if name != "root":
        options = f"lowerdir={top}:{stack}"
    return [f"{name}={scratch}/mounted", f"mount -t overlay overlay -o {options} ${name}"]


def _inside(image: Image, command: Sequence[str], what: Instruction, environment: Mapping[str, str]) -> None:
    """A step of the build, as root and with the network."""
    given = {name: os.environ[name] for name in PASSES_THROUGH if name in os.environ}
    if AUTHORITIES.exists():  # where the way to the package index goes through a proxy with its own authority
        given |= dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT"), "/run/authorities.crt")
    words = [f"{name}={value}" for name, value in {"HOME": "/root", **given, **environment}.items()]
    script = [
        *_mounted(image),
        *_kernel("$root"),
        "mount -t tmpfs tmpfs $root/run",
        "mount --bind /etc/resolv.conf $root/etc/resolv.conf",
        f"[ ! -e {AUTHORITIES} ] || cp -L {AUTHORITIES} $root/run/authorities.crt",
        f'exec chroot $root env -i {shlex.join(words)} /bin/sh -c \'cd "$0" && exec "$@"\' '
        f"{shlex.quote(image.workdir)} {shlex.join(command)}",
    ]
    _in_namespace("\n".join(script), what, {})


def container(
    image: Image,
    command: Iterable[str] | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    mounts: Mapping[str, Path] | None = None,
    writable: Iterable[str] = ("/tmp", "/var/lib/noetl"),
) -> list[str]:
    """A command line that runs what a pod would: the image's user without capabilities, a read-only root.

    Args:
        command: in place of the image's CMD; its ENTRYPOINT goes before it.
        mounts: folders of this machine by their place in the container, which must exist there; read-only.
        writable: empty folders in memory, as emptyDir makes them.
    """
    user, _, group = image.user.partition(":")
    words = [f"{name}={value}" for name, value in {**image.environment, **(environment or {})}.items()]
    lowers = ":".join(map(str, image.layers))
    scratch = image.layers[0].parent / f"{image.layers[0].name}.container"
    scratch.mkdir(exist_ok=True)
    script = [
        "set -e",
        f"root={scratch}",
        f"mount -t overlay overlay -o lowerdir={lowers} $root",
        *_kernel("$root"),
        *(f"mount -t tmpfs -o mode=1777 tmpfs $root{place}" for place in writable),
        *(f"mount --bind /etc/{name} $root/etc/{name}" for name in ("hosts", "resolv.conf")),  # as a kubelet does
        *(f"mount --bind -o ro {shlex.quote(str(path))} $root{place}" for place, path in (mounts or {}).items()),
        f"exec chroot $root setpriv --reuid={user} --regid={group} --clear-groups --bounding-set=-all --no-new-privs "
        f'env -i {shlex.join(words)} /bin/sh -c \'cd "$0" && exec "$@"\' {shlex.quote(image.workdir)} '
        f"{shlex.join([*image.entrypoint, *(image.command if command is None else command)])}",
    ]
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", "\n".join(script)]


def _kernel(root: str) -> list[str]:
    return [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]


def _in_namespace(script: str, what: Instruction, variables: Mapping[str, str]) -> None:
    done = subprocess.run(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child", "bash", "-c", f"set -e\n{script}"],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, f"line {what.line}: {what.keyword} {what.text}\n{done.stdout[-6000:]}"


def clean_context(project: Path, folder: Path) -> Path:
    """A copy of what the builder would be sent."""
    for path in context_files(project, project / ".dockerignore"):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(project / path, folder / path)
    return folder


def debian(folder: Path) -> Path:
    """The root of a small Debian, made as its slim images are."""
    programs = {**os.environ}
    maker = shutil.which("debootstrap")
    if maker is None:  # a script with its tables, which needs no installing
        unpacked = folder / "debootstrap"
        unpacked.mkdir()
        subprocess.run(["apt-get", "download", "--quiet", "debootstrap"], cwd=unpacked, check=True)
        (package,) = unpacked.glob("*.deb")
        subprocess.run(["dpkg-deb", "-x", package, unpacked], check=True)
        maker = str(unpacked / "usr/sbin/debootstrap")
        programs["DEBOOTSTRAP_DIR"] = str(unpacked / "usr/share/debootstrap")
    root = folder / "debian"
    done = subprocess.run(
        [maker, "--variant=minbase", SUITE, root, MIRROR], env=programs, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for name in ("hosts", "resolv.conf"):
        (root / "etc" / name).touch()
    (root / "etc/apt/sources.list").unlink()
    (root / "etc/apt/sources.list.d/debian.sources").write_text(SOURCES)
    (root / "etc/dpkg/dpkg.cfg.d/slim").write_text(SLIM)
    for left_out in ("doc", "info", "locale", "man"):
        shutil.rmtree(root / "usr/share" / left_out, ignore_errors=True)
    return root
