"""Every step of the Dockerfile in a clean root, and what comes out of it as a pod would start it."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import asyncpg
import psutil
import pytest

from noetl_dagster import embedded
from noetl_dagster.settings import Settings, StoreTier
from noetl_dagster.storage.store import ResultStore
from tests.image.dockerfile import PUBLISHED, Dockerfile, read_dockerfile
from tests.image.roots import Image, build, clean_context, container, debian
from tests.image.test_dockerfile import PROJECT, _lock
from tests.processes import killed_in_the_end
from tests.waiting import PROCESS_SECONDS, until_now

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("unshare") is None,
        reason="steps are run in namespaces and by chroot, which takes root on Linux",
    ),
]

SITE = "opt/noetl/.venv/lib/python3.13/site-packages"
LOCAL = "127.0.0.1"
IMPORTED = "from noetl_dagster.tools.registry import tool_for;"


@pytest.fixture(scope="module")
def dockerfile() -> Dockerfile:
    return read_dockerfile(PROJECT / "Dockerfile")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Gigabytes, which pytest would keep for three runs."""
    with tempfile.TemporaryDirectory(prefix="noetl-image-") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def images(dockerfile: Dockerfile, folder: Path) -> dict[str, Image]:
    """The stages, built."""
    context = folder / "context"
    context.mkdir()
    clean_context(PROJECT, context)
    base, built = debian(folder), {}
    for target in PUBLISHED:
        build(dockerfile, target, context, base, folder, built)
    return built


@pytest.fixture(scope="module")
def platform(images: dict[str, Image]) -> Image:
    return images["platform"]


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["noetl-dagster", "--help"], "NoETL playbooks on Dagster"),
        (["noetl-dagster", "check", "playbooks"], "patient_flow.yaml: ok"),
        (["noetl-dagster", "--version"], "0.1.0"),
        (["dagster", "api", "grpc", "--help"], "gRPC"),
        (["dagster-webserver", "--version"], "dagster-webserver"),
        (["dagster-daemon", "--help"], "liveness-check"),
        (["java", "-version"], 'version "21.'),
        (["sh", "-c", '"$JAVA_HOME/bin/java" -version'], 'version "21.'),
        (["id"], "uid=10001(noetl) gid=10001(noetl) groups=10001(noetl)"),
        (["pwd"], "/opt/noetl"),
        (["sh", "-c", "touch /tmp/a /var/lib/noetl/a && echo written"], "written"),
    ],
)
def test_a_command_runs(platform: Image, command: list[str], expected: str) -> None:
    done = ran(platform, *command)

    assert done.returncode == 0, done.stderr
    assert expected in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["noetl-dagster", "worker", "--help"], "Run commands of steps"),
        (["noetl-dagster", "check", "playbooks"], "patient_flow.yaml: ok"),
        (["sh", "-c", "command -v java || echo no Java"], "no Java"),
        (["python", "-c", f"{IMPORTED} print(tool_for('python').kind)"], "python"),
        (
            ["python", "-c", f"{IMPORTED} tool_for('spark')"],
            "run the step in a pool whose workers have the image noetl",
        ),
    ],
)
def test_a_worker_without_spark_does_the_rest(images: dict[str, Image], command: list[str], expected: str) -> None:
    done = ran(images["worker"], *command)
    assert expected in done.stdout + done.stderr


def test_the_image_of_workers_is_much_smaller(images: dict[str, Image]) -> None:
    def size(name: str) -> int:
        return sum(path.lstat().st_size for layer in images[name].layers[:-1] for path in layer.rglob("*"))

    assert size("worker") < 0.6 * size("platform")


def test_nobody_writes_into_the_image(platform: Image) -> None:
    done = ran(platform, "touch", "/opt/noetl/playbooks/mine.yaml")

    assert "Read-only file system" in done.stderr
    writable = ran(platform, "find", "/", "-xdev", "-user", "10001", "-not", "-path", "/proc/*")
    assert set(writable.stdout.split()) <= {"/opt/noetl/dagster", "/var/lib/noetl"}


def test_without_settings_it_says_what_is_missing(platform: Image) -> None:
    done = ran(platform, *platform.command)

    assert done.returncode != 0
    assert "NOETL_DB_URL" in done.stdout + done.stderr


def test_the_packages_are_those_of_the_lock(platform: Image) -> None:
    listed = ran(
        platform,
        "python",
        "-c",
        "import importlib.metadata as m; [print(d.name, d.version) for d in m.distributions()]",
    )

    found = {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, version in map(str.split, listed.stdout.splitlines())
    }
    locked = {name: version for name, (version, _) in _lock("requirements-image.lock").items()}
    assert found == locked | {"noetl-dagster": "0.1.0"}


def test_no_process_compiles_what_it_imports(images: dict[str, Image]) -> None:
    """Compiled files are taken whatever the time of their sources is, and hold none."""
    site = images["build"].layers[0] / SITE
    for source in [*site.glob("noetl_dagster/**/*.py"), *site.glob("dagster/**/*.py")]:
        compiled = source.parent / "__pycache__" / f"{source.stem}.cpython-313.pyc"
        assert compiled.read_bytes()[4:8] == b"\1\0\0\0", compiled


def test_a_second_build_is_the_same(images: dict[str, Image], dockerfile: Dockerfile, folder: Path) -> None:
    again = folder / "again"
    again.mkdir()
    below = images["base"]
    # a stack of its own, since an overlay belongs to one at a time
    built = {"base": replace(below, layers=(shutil.copytree(below.layers[0], again / "base"), *below.layers[1:]))}
    build(dockerfile, "build", folder / "context", below.layers[-1], again, built)

    first, second = (digests(one["build"].layers[0] / "opt/noetl") for one in (images, built))
    assert {name for name in first.keys() | second.keys() if first.get(name) != second.get(name)} == set()
    assert len(first) > 10_000


@pytest.mark.parametrize("user", ["10001:10001", "1234567:0"], ids=["own", "unknown"])
def test_spark_runs_in_one_process(platform: Image, user: str) -> None:
    done = ran(
        replace(platform, user=user),
        "python",
        "-c",
        "from noetl_dagster.settings import get_settings\n"
        "from noetl_dagster.spark.sessions import SparkSessions\n"
        "spark = SparkSessions(get_settings()).get()\n"
        "print('sum', spark.sparkContext.parallelize([1, 2, 3]).map(lambda n: n * 2).sum())",
        NOETL_SPARK_MASTER="local[1]",
        NOETL_SPARK_DRIVER_MEMORY="512m",
    )

    assert "sum 12" in done.stdout, done.stderr[-3000:]


def test_processes_of_spark_find_a_name_for_any_user(images: dict[str, Image]) -> None:
    spark = images["spark"]
    assert ran(replace(spark, user="1234567:0"), "id", "-un").stdout == ran(spark, "id", "-un").stdout == "noetl\n"


def test_the_api_serves_is_healthy_and_ends(platform: Image, settings: Settings, folder: Path) -> None:
    """The image's own command, against real services; SIGTERM reaches it through tini."""
    environment = {**_leading_to(settings), "NOETL_SERVICE_PORT": str(_free_port())}
    with started(platform, *platform.command, **environment) as process:
        script = "import sys, urllib.request as http; print(http.urlopen(sys.argv[1]).read().decode())"
        check = ["python", "-c", script, f"http://{LOCAL}:{environment['NOETL_SERVICE_PORT']}/health"]
        until_now(lambda: process.poll() is not None or beside(process, *check).returncode == 0)
        assert process.poll() is None, process.stdout.read()

        (init,) = psutil.Process(process.pid).children()
        init.send_signal(signal.SIGTERM)

        assert process.wait(PROCESS_SECONDS) == 0


def test_the_code_location_answers(platform: Image, settings: Settings, tmp_path: Path) -> None:
    """With its instance mounted as a ConfigMap would be, and the probe of its pod."""
    storage = {
        "module": "noetl_dagster.compiler.executors.storages",
        "class": "PostgresStorage",
        "config": {"postgres_url": {"env": "NOETL_DAGSTER_DB_URL"}},
    }
    (tmp_path / "dagster.yaml").write_text(json.dumps({"storage": {"custom": storage}}))
    tmp_path.chmod(0o755)
    port = str(_free_port())
    command = ["dagster", "api", "grpc", "-h", LOCAL, "-p", port, "-m", "noetl_dagster.definitions"]
    mounts = {"/opt/noetl/dagster": tmp_path}
    with started(platform, *command, mounts=mounts, **_leading_to(settings)) as process:
        until_now(
            lambda: (
                process.poll() is not None
                or ran(platform, "dagster", "api", "grpc-health-check", "-p", port).returncode == 0
            )
        )
        assert process.poll() is None, process.stdout.read()
        listed = ran(
            platform,
            *("dagster", "job", "list", "--grpc-host", LOCAL, "--grpc-port", port),
            mounts=mounts,
            **_leading_to(settings),
        )

    assert "patient_flow" in listed.stdout, listed.stdout + listed.stderr[-3000:]


async def test_an_executor_works_for_its_driver(
    images: dict[str, Image], settings: Settings, pool: asyncpg.Pool
) -> None:
    """What Spark's scheduler on Kubernetes sets in an executor's pod, and a driver that has no other executors.

    The driver's scheduler is that of a standalone master: it takes executors in the same way, and needs no cluster.
    """
    async with ResultStore(settings, pool) as store:
        ref = await store.put(
            [{"n": n} for n in range(50)], execution_id=1, step="s", name="rows", tier=StoreTier.MINIO
        )
    master_port, driver_port = _free_port(), _free_port()
    master = f"spark://{LOCAL}:{master_port}"
    spark = images["spark"]
    options = {
        "spark.driver.host": LOCAL,
        "spark.driver.bindAddress": LOCAL,
        "spark.driver.port": str(driver_port),
        "spark.python.daemon.module": "noetl_dagster.spark.daemon",
    }
    address = ["--host", LOCAL, "--port", str(master_port), "--webui-port", "0"]
    main = [
        "/opt/java/bin/java",
        "-cp",
        "/opt/spark/jars/*",
        "org.apache.spark.deploy.master.Master",
        *address,
    ]
    with started(spark, *main, SPARK_LOCAL_IP=LOCAL) as leader:
        _until_line(leader, "I have been elected leader")
        driving = started(
            images["platform"],
            "python",
            "-c",
            DRIVER,
            ref.physical_uri,
            **_leading_to(settings),
            NOETL_SPARK_MASTER=master,
            NOETL_SPARK_DRIVER_MEMORY="512m",
            NOETL_SPARK_CONFIG=json.dumps(options),
        )
        with driving as driver:
            application = _until_line(driver, "application ").split()[-1]
            pod = {
                "SPARK_DRIVER_URL": f"spark://CoarseGrainedScheduler@{LOCAL}:{driver_port}",
                "SPARK_EXECUTOR_ID": "1",
                "SPARK_EXECUTOR_CORES": "1",
                "SPARK_EXECUTOR_MEMORY": "512m",
                "SPARK_APPLICATION_ID": application,
                "SPARK_EXECUTOR_POD_IP": LOCAL,
                "SPARK_EXECUTOR_POD_NAME": "executor-1",
                "SPARK_RESOURCE_PROFILE_ID": "0",
                "SPARK_CONF_DIR": "/opt/spark/conf",
                "SPARK_USER": "noetl",
                "SPARK_JAVA_OPT_0": "-Dnoetl.first=said by the driver",
                "SPARK_JAVA_OPT_1": "--add-opens=java.base/java.nio=ALL-UNNAMED",
            }
            with started(spark, "executor", writable=EXECUTOR_FOLDERS, **pod) as executor:
                answer = _until_line(driver, "rows ")

                assert answer.split()[1:] == ["50", "/opt/noetl/.venv/bin/python", "executor-1"]
                assert driver.wait(PROCESS_SECONDS) == 0
                assert executor.wait(PROCESS_SECONDS) == 0  # it ends with its driver


async def test_a_server_of_spark_connect_has_this_package(
    images: dict[str, Image], settings: Settings, pool: asyncpg.Pool
) -> None:
    async with ResultStore(settings, pool) as store:
        ref = await store.put(
            [{"n": n} for n in range(50)], execution_id=1, step="s", name="rows", tier=StoreTier.MINIO
        )
    port = _free_port()
    options = {
        "spark.driver.host": LOCAL,
        "spark.connect.grpc.binding.address": LOCAL,
        "spark.connect.grpc.binding.port": port,
        "spark.ui.enabled": "false",
    }
    words = [word for name, value in options.items() for word in ("--conf", f"{name}={value}")]
    environment = {"SPARK_EXECUTOR_POD_NAME": "server", "SPARK_USER": "noetl"}
    serving = started(
        images["spark"], "connect", "--master", "local[1]", *words, writable=EXECUTOR_FOLDERS, **environment
    )
    with serving as server:
        _until_line(server, "Spark Connect server started")
        done = ran(
            images["platform"],
            *("python", "-c", DRIVER, ref.physical_uri),
            **_leading_to(settings),
            NOETL_SPARK_REMOTE=f"sc://{LOCAL}:{port}",
        )

    assert "rows 50 /opt/noetl/.venv/bin/python server" in done.stdout, done.stdout + done.stderr[-3000:]


EXECUTOR_FOLDERS = ("/tmp", "/var/lib/noetl", "/opt/spark/work-dir")

DRIVER = """
import sys
from noetl_dagster.settings import get_settings
from noetl_dagster.spark.sessions import SparkSessions
from noetl_dagster.spark.results import FORMAT, StoredPart, dump_parts

spark = SparkSessions(get_settings()).get()
if "local" not in spark.conf.get("spark.master", "local"):
    print("application", spark.sparkContext.applicationId, flush=True)
parts = dump_parts([StoredPart(sys.argv[1], "application/json", sha256=None)])
rows = spark.read.format(FORMAT).schema("value string").option("parts", parts).load()

def where(frames):
    import os, sys
    import noetl_dagster.storage  # the executor has the package
    import pandas
    for frame in frames:
        yield pandas.DataFrame({"n": [len(frame)], "python": sys.executable, "pod": os.environ["SPARK_EXECUTOR_POD_NAME"]})

found = rows.mapInPandas(where, "n long, python string, pod string").collect()
print("rows", sum(one.n for one in found), *{f"{one.python} {one.pod}" for one in found}, flush=True)
spark.stop()
"""


def ran(
    image: Image, *command: str, mounts: Mapping[str, Path] | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A container that runs to its end."""
    return subprocess.run(
        container(image, command, environment=environment, mounts=mounts),
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )


def beside(process: subprocess.Popen[str], *command: str) -> subprocess.CompletedProcess[str]:
    """A command in a container that runs, with its environment and user: as an engine asks for its health."""
    init = until_now(psutil.Process(process.pid).children, "the container to start")[0]
    user = [f"--setuid={init.uids().real}", f"--setgid={init.gids().real}"]
    return subprocess.run(
        ["nsenter", f"--target={init.pid}", "--mount", "--pid", "--root", "--wd", *user, "--", *command],
        env=init.environ(),
        capture_output=True,
        text=True,
        timeout=PROCESS_SECONDS,
        check=False,
    )


@contextmanager
def started(
    image: Image,
    *command: str,
    mounts: Mapping[str, Path] | None = None,
    writable: tuple[str, ...] = ("/tmp", "/var/lib/noetl"),
    **environment: str,
) -> Iterator[subprocess.Popen[str]]:
    """A container that runs meanwhile; what it prints on either stream is ``stdout``."""
    with killed_in_the_end() as start:
        yield start(
            container(image, command, environment=environment, mounts=mounts, writable=writable),
            stdout=subprocess.PIPE,
            text=True,
        )


def digests(folder: Path) -> dict[str, str]:
    """Each file's sha256, each link's target."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_symlink() or path.is_file()
    }


def _until_line(process: subprocess.Popen[str], beginning: str) -> str:
    """The first line that holds a text; all that came before it is said when the process ends without."""
    read: list[str] = []
    assert process.stdout is not None
    for line in process.stdout:
        read.append(line)
        if beginning in line:
            return line
    raise AssertionError(f"ended without {beginning!r}:\n" + "".join(read)[-6000:])


def _leading_to(settings: Settings) -> dict[str, str]:
    """The environment of a pod that uses a test's services."""
    ours = embedded.environment(settings)
    return {name: value for name, value in ours.items() if name not in ("NOETL_HOME", "NOETL_PVC_MOUNT_PATH")}


def _free_port() -> int:
    with socket.create_server((LOCAL, 0)) as opened:
        return opened.getsockname()[1]
