"""A chain of small steps beside plain Dagster assets, one after another, on the same PostgreSQL.

    python -m benchmarks.chain --steps 100 --turns 3

Ours is a playbook of python steps, with every event of its own log beside Dagster's. The plain one is as many
assets, each of which takes the one before it, in Dagster's in-process executor with its pickles in files. Both
run in this process, in turns; the best of each counts. Prints milliseconds a step and the ratio.
"""

# No "from __future__ import annotations": Dagster reads the annotations of assets.
import argparse
import tempfile
import time
from pathlib import Path

from dagster import AssetIn, AssetsDefinition, DagsterInstance, FilesystemIOManager, asset, materialize

from noetl_dagster import embedded
from noetl_dagster.code_location.launch import launch
from noetl_dagster.embedded import dagster_home
from noetl_dagster.playbook.loader import parse_playbook
from noetl_dagster.playbook.models import Playbook
from noetl_dagster.resources.engines import EngineProvider
from noetl_dagster.settings import Settings


def chain_of_steps(steps: int) -> Playbook:
    lines = [
        "apiVersion: noetl.io/v2",
        "kind: Playbook",
        "metadata: {name: chain, path: bench/chain}",
        "workflow:",
    ]
    for number in range(steps):
        given = '"{{ 0 }}"' if not number else f'"{{{{ step_{number - 1}.data }}}}"'
        name = "start" if not number else f"step_{number}"
        given = given.replace("step_0.", "start.")
        arc = f"\n    next: [step_{number + 1}]" if number + 1 < steps else ""
        lines.append(
            f'  - step: {name}\n    tool: {{kind: python, input: {{n: {given}}}, code: "result = n + 1"}}{arc}'
        )
    return parse_playbook("\n".join(lines))


def chain_of_assets(steps: int) -> list[AssetsDefinition]:
    @asset(name="plain_0")
    def first() -> int:
        return 1

    def following(number: int) -> AssetsDefinition:
        @asset(name=f"plain_{number}", ins={"before": AssetIn(f"plain_{number - 1}")})
        def later(before: int) -> int:
            return before + 1

        return later

    return [first, *(following(number) for number in range(1, steps))]


def seconds_of_ours(playbook: Playbook, noetl: EngineProvider, instance: DagsterInstance) -> float:
    execution_id = noetl.engine().runtime.ids.next()
    started = time.perf_counter()
    launched = launch(playbook, noetl, instance, execution_id=execution_id)
    assert launched.success, launched.error
    return time.perf_counter() - started


def seconds_of_plain(assets: list[AssetsDefinition], instance: DagsterInstance, folder: str) -> float:
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    started = time.perf_counter()
    done = materialize(
        assets,
        instance=instance,
        resources={"io_manager": FilesystemIOManager(base_dir=folder)},
        run_config=quiet,
    )
    assert done.success
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    settings = embedded.ensure(Settings())
    noetl = EngineProvider(settings)
    playbook, assets = chain_of_steps(arguments.steps), chain_of_assets(arguments.steps)
    ours, plain = [], []
    home = str(dagster_home(settings))
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.turns):
            with DagsterInstance.from_config(home) as instance:
                plain.append(seconds_of_plain(assets, instance, str(Path(folder, str(turn)))))
            with DagsterInstance.from_config(home) as instance:
                ours.append(seconds_of_ours(playbook, noetl, instance))
            print(f"turn {turn + 1}: plain Dagster {plain[-1]:.2f} s, ours {ours[-1]:.2f} s", flush=True)
    each = [1000 * min(found) / arguments.steps for found in (plain, ours)]
    print(
        f"{arguments.steps} steps: plain Dagster {each[0]:.1f} ms a step, ours {each[1]:.1f}, "
        f"ratio {min(ours) / min(plain):.2f}"
    )


if __name__ == "__main__":
    main()
