"""The `apex` command: parses the command line and calls what does the work."""

from __future__ import annotations

from launch.run import beginning

if __name__ == "__main__":
    beginning.end_on_interrupt()  # the imports below take a while, in which Ctrl-C may come

import argparse
import contextlib
import math
import re
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from apex import config as configuration
from apex.config import ConfigError
from apex.say import protect, warn
from launch.cli.submit import KINDS
from launch.run import world
from launch.run.options import Parser

_REFUSAL_TIMEOUT_S = 120.0  # longest start of rank 0, which prints a refusal for all ranks


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0 done, 1 failed, 2 refused."""
    arguments, options = sys.argv[1:] if argv is None else argv, argparse.Namespace()
    protect()
    try:
        options = _parser().parse_args(arguments)
        if options.run_command is not _train:  # which handles signals itself
            beginning.raise_on_interrupt()
        return options.run_command(options, arguments)
    except ConfigError as error:
        return _refuse(_as_typed(str(error), options))
    except KeyboardInterrupt:  # there is no run to end yet
        warn("apex: interrupted")
        return 130


def _as_typed(refusal: str, options: argparse.Namespace) -> str:
    """Return the refusal with the typed options in place of the fields that they set."""
    for name, field in vars(options).get("short_for", {}).items():
        if vars(options)[name] is not None:
            # A field after another source than --set ("preset 'x': run.seed") was not typed.
            refusal = re.sub(rf"(?:--set: |(?<!: )){re.escape(field)}\b(?: =)?", f"--{name}", refusal)
    return refusal


def _refuse(refusal: str) -> int:
    """Print the refusal, once for a whole MPI world; return the exit status.

    mpirun ends all ranks as soon as one fails. So the other ranks wait until rank 0 has printed and mpirun
    ends them; if only one rank is refused, it prints after the wait. Tasks of srun that form no world exit
    with 0: SLURM would otherwise end task 0 before it has printed.
    """
    try:
        here = world.from_environment()
    except ConfigError:
        here = world.from_srun()
        if here is not None and here[0] != 0:
            return 0
    if here is not None and here[0] != 0:
        time.sleep(_REFUSAL_TIMEOUT_S)
    warn(f"apex: {refusal}")
    return 2


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))


def _above_zero(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0.0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"'{text}' must be a number above 0")


def _natural(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number, from 0 to 999999999")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or len(text) > 6 or int(text) == 0:
        raise argparse.ArgumentTypeError(f"'{text}' must be a whole number, from 1 to 999999")
    return int(text)


_COUNT: dict[str, Any] = {"type": _positive, "metavar": "N"}
_NUMBER: dict[str, Any] = {"type": _natural, "metavar": "N"}
_RATE: dict[str, Any] = {"type": _above_zero, "metavar": "N"}
_SECONDS: dict[str, Any] = {"type": _above_zero, "metavar": "S"}
_FILE: dict[str, Any] = {"type": Path, "metavar": "FILE"}
_NAME: dict[str, Any] = {"metavar": "NAME"}
_NAMES: dict[str, Any] = {"type": lambda text: tuple(text.split(",")), "metavar": "NAME,NAME"}
_TEXT: dict[str, Any] = {}
_FLAG: dict[str, Any] = {"action": "store_true"}
_SETTING = {"action": "append", "default": [], "metavar": "section.field=value", "dest": "overrides"}
_RUN = "a run folder, its name in runs/, or latest"
_SHORT_FOR = {name: f"run.{name}" for name in ("transport", "seed")}  # option -> the field that it sets

Command = Callable[[argparse.Namespace, list[str]], int]
Option = tuple[str, dict[str, Any], str]
"""Name, what argparse needs to know beside it, help."""


def _parser() -> Parser:
    parser = Parser(prog="apex", description="Ape-X over MPI: many actors gather experience for one learner.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_add_train, _add_playback, _add_bench, _add_compare, _add_submit, _add_doctor):
        add(commands)
    return parser


def _add(
    commands: Any, name: str, run: Command, summary: str, about: str, options: list[Option], **defaults: Any
) -> Parser:
    """Add a command; ``summary`` is its line in the list of commands, ``about`` heads its own help."""
    parser = commands.add_parser(name, help=summary, description=about)
    for option, settings, text in options:
        parser.add_argument(option, help=text, **settings)
    parser.set_defaults(run_command=run, **defaults)
    return parser


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return --set, and what --transport, --seed and --tolerate set."""
    typed = {field: vars(options)[name] for name, field in options.short_for.items()}
    return [*options.overrides, *(f"{field}={value}" for field, value in typed.items() if value is not None)]


def _typed(options: argparse.Namespace, fields: tuple[str, ...]) -> dict[str, Any]:
    """Return the options named like ``fields`` that were typed."""
    return {name: value for name in fields if (value := vars(options).get(name)) is not None}


def _add_train(commands: Any) -> None:
    about = "Train a preset. Under mpirun (mpirun -n 64 apex train pong) this is one rank; else start mpirun."
    train = _add(commands, "train", _train, "train a preset", about, [
        ("preset", {"nargs": "?"}, f"{', '.join(configuration.presets())}, or a .toml file"),
        ("--resume", {"metavar": "RUN"}, f"resume a run ({_RUN}); --set may change it"),
        ("--set", _SETTING, "set a configuration field; may be repeated"),
        ("--ranks", {"type": _positive}, "processes: a learner, replay ranks, an evaluator, and actors"),
        ("--transport", _TEXT, "short for --set run.transport=..."),
        ("--seed", _TEXT, "short for --set run.seed=..."),
        ("--tolerate", _TEXT, "actors: replace lost processes; short for --set run.fault_tolerance=..."),
    ], short_for=_SHORT_FOR | {"tolerate": "run.fault_tolerance"})  # fmt: skip
    train.epilog, train.formatter_class = _config_help(), argparse.RawDescriptionHelpFormatter


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import train

    overrides = _overrides(options)
    if options.resume is not None:
        return train.resume(options.resume, options.preset, overrides, options.ranks, arguments)
    if options.preset is None:
        raise ConfigError(f"name a preset to train; {configuration.nearest('', configuration.presets())}")
    return train.train(
        configuration.load(options.preset, overrides), options.preset, options.ranks, arguments
    )


def _config_help() -> str:
    """Return every configuration field with its default, unit and meaning."""
    lines = ["configuration fields (--set section.field=value):"]
    for section, cls in configuration.sections().items():
        lines.append(f"\n[{section}]  {(cls.__doc__ or '').splitlines()[0]}")
        for name, field in configuration.fields(cls).items():
            unit = f" [{field.metadata['unit']}]" if field.metadata["unit"] else ""
            choices = f" ({' | '.join(field.metadata['choices'])})" if field.metadata["choices"] else ""
            setting = f"{section}.{name} = {configuration.toml_value(field.default)}"
            lines.append(f"  {setting:<42} {field.metadata['doc']}{choices}{unit}")
    return "\n".join(lines)


def _add_playback(commands: Any) -> None:
    run: list[Option] = [
        ("run", _TEXT, _RUN),
        ("--checkpoint", {"choices": ("best", "latest")}, "weights to use (default: best, or else latest)"),
        ("--seed", {"type": _natural}, "seed of the first episode (default: the run's evaluator.seed)"),
    ]
    about = "Play greedy episodes, scored in full, and print the mean return."
    _add(commands, "eval", _evaluate, "evaluate a run", about, [
        *run,
        ("--episodes", _COUNT, "episodes (default: the run's evaluator.episodes)"),
    ])  # fmt: skip
    _add(commands, "play", _play, "film a run", "Film one greedy episode as an animated GIF.", [
        *run,
        ("--gif", _FILE | {"required": True}, ".gif file to write"),
        ("--frames", {"type": _positive, "default": 1000}, "longest film, in frames (default: 1000)"),
    ])  # fmt: skip
    _add(commands, "plot", _plot, "draw learning curves", "Draw the learning curves of runs.", [
        ("runs", {"nargs": "*", "default": ["latest"]}, f"{_RUN} (the default)"),
        ("--out", _FILE | {"default": Path("curve.png")}, ".png, .pdf or .svg file (default: curve.png)"),
    ])  # fmt: skip


def _evaluate(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import playback

    return playback.evaluate(options.run, options.checkpoint, options.episodes, options.seed)


def _play(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import playback

    return playback.play(options.run, options.checkpoint, options.gif, options.seed, options.frames)


def _plot(options: argparse.Namespace, arguments: list[str]) -> int:
    from apex import output_file
    from apex.run_folder import resolve
    from launch.cli.plot import learning_curve

    out = output_file.OutputFile("--out", options.out, output_file.PICTURE)
    # runs/* also gives runs/latest, a link
    runs = {folder.resolve(): folder for folder in map(resolve, options.runs)}
    learning_curve(list(runs.values()), out)
    return 0


def _add_bench(commands: Any) -> None:
    about = "Measure the parts of this program, also against those of other libraries."
    bench = commands.add_parser("bench", help="measure the parts", description=about)
    parts = bench.add_subparsers(dest="part", required=True, metavar="part")
    about = "Measure the priority indexes on one core, against those of other libraries that are installed."
    _add(parts, "index", _bench_index, "priority indexes, against those of other libraries", about, [
        ("--json", _FILE, "write the machine and every row as JSON"),
        ("--png", _FILE, "plot updates against k, and steps"),
        ("--quick", _FLAG, "less than a minute, less precise (default: about four minutes)"),
        ("--leaves", _NUMBER | {"default": 2**21}, "slots of each index (default: 2097152)"),
        ("--indexes", _NAMES, "measure only these (default: all)"),
        ("--core", _NUMBER, "core to run on (default: the last one)"),
    ])  # fmt: skip
    about = "Train a preset with all roles, and print its rates and what each role uses of the machine."
    _add(parts, "system", _bench_system, "a whole run of a preset", about, [
        ("--preset", {"default": "pong"}, "preset to train (default: pong)"),
        ("--actors", _COUNT | {"default": 2}, "actors (default: 2)"),
        ("--seconds", _SECONDS | {"default": 60.0}, "length of the measurement (default: 60)"),
        ("--set", _SETTING, "as for train"),
        ("--json", _FILE, "write the machine and the rates as JSON"),
    ], short_for={"actors": "actor.count"})  # fmt: skip
    about = (
        "Measure whether one replay rank sustains these rates with synthetic peers; by default, the paper's."
    )
    _add(parts, "rates", _bench_rates, "given rates in and out at once", about, [
        ("--transitions-per-s", _RATE, "of all actors together (default: 12500)"),
        ("--batches-per-s", _RATE, "of 512 samples (default: 19)"),
        ("--seconds", _SECONDS, "length of the measurement (default: 60)"),
        ("--actors", _COUNT, "actors (default: 2)"),
        ("--transport", _NAME, "mpi or zmq (default: mpi)"),
        ("--json", _FILE, "write the machine and the rates as JSON"),
    ])  # fmt: skip


def _bench_index(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.bench import index

    names = None if options.indexes is None else list(options.indexes)
    return index.run(options.json, options.png, options.quick, options.leaves, names, options.core)


def _bench_system(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.bench import system

    return system.run(options.preset, options.actors, options.seconds, options.overrides, options.json)


def _bench_rates(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.bench import rates

    return rates.run(rates.Options(**_typed(options, rates.FIELDS)), options.json)


def _add_compare(commands: Any) -> None:
    about = (
        "Compare the transports on this machine: intake, sampling and a preset, on free and on busy cores."
    )
    _add(commands, "compare", _compare, "compare the transports here", about, [
        ("--transports", _NAMES, "some of mpi, zmq, mpi-pickle, zmq-pickle (default: all)"),
        ("--actors", {"type": _counts, "metavar": "N,N"}, "numbers of actors (default: 1,2,4,6)"),
        ("--repetitions", _COUNT, "runs of each combination (default: 3)"),
        ("--seconds", _SECONDS, "length of the measurement in a run (default: 3)"),
        ("--preset-seconds", _SECONDS, "the same for the preset (default: 15)"),
        ("--regimes", _NAMES, "free, or busy: one more process on every core (default: both)"),
        ("--workloads", _NAMES, "some of intake, mixed, preset (default: all)"),
        ("--preset", _TEXT, "what the preset workload trains (default: pong-small)"),
        ("--baseline", _NAME, "the transport of ratio 1 (default: zmq-pickle)"),
        ("--json", _FILE, "write the machine and every run as JSON"),
        ("--png", _FILE, "plot throughput and ratio against the number of actors"),
        ("--report", _FILE, "write the comparison as Markdown"),
        ("--quick", _FLAG, "one short run of each: less than three minutes, less precise"),
    ])  # fmt: skip


def _compare(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.bench import transports

    quick = transports.QUICK if options.quick else {}
    chosen = transports.Options(**(quick | _typed(options, transports.FIELDS)))
    return transports.run(chosen, options.json, options.png, options.report, shlex.join(["apex", *arguments]))


def _add_submit(commands: Any) -> None:
    about = "Fill in a SLURM script (launch/slurm), write it to RUNS/submitted, and submit it."
    _add(commands, "submit", _submit, "train a preset as a SLURM job", about, [
        ("preset", _TEXT, "as for train"),
        ("--kind", {"choices": KINDS}, "script to use (default: single or many, by --nodes)"),
        ("--nodes", _COUNT, "nodes; heterogeneous: nodes of the actors (default: 1)"),
        ("--ranks-per-node", _COUNT, "processes per node (default: enough for the preset's actors)"),
        ("--cpus-per-rank", _COUNT, "cores per process (default: 1)"),
        ("--time", _TEXT, "time limit in the form of sbatch: 24:00:00"),
        ("--mem", _TEXT, "memory per node in the form of sbatch: 64G"),
        ("--partition", _NAME, "partition; heterogeneous: partition of the actors"),
        ("--learner-partition", _NAME, "heterogeneous: partition of the learner"),
        ("--gpus", _NUMBER, "GPUs per node; heterogeneous: GPUs of the learner's node (default there: 1)"),
        ("--setup", {"metavar": "LINE"}, "shell line to run first: 'module load openmpi'"),
        ("--launch", {"metavar": "COMMAND"}, "starts ranks on many nodes (default: 'srun --mpi=pmix')"),
        ("--sbatch", {"action": "append", "metavar": "NAME=VALUE"},
         "another option of sbatch, such as qos=low; may be repeated"),
        ("--set", _SETTING, "as for train"),
        ("--transport", _TEXT, "as for train"),
        ("--seed", _TEXT, "as for train"),
        ("--doctor", _FLAG, "run `apex doctor` in the job instead of training"),
        ("--dry-run", _FLAG, "only print the script and the call"),
    ], short_for=_SHORT_FOR)  # fmt: skip


def _submit(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import submit

    lists = {"overrides": tuple(_overrides(options)), "sbatch": tuple(options.sbatch or ())}
    return submit.run(submit.Request(**_typed(options, submit.FIELDS) | lists))


def _add_doctor(commands: Any) -> None:
    about = "Check whether a preset would run well here. Under mpirun or srun, check their world of ranks."
    _add(commands, "doctor", _doctor, "check this machine or job for faults", about, [
        ("preset", {"nargs": "?"}, "as for train (default: check only the machine)"),
        ("--set", _SETTING, "as for train"),
        ("--ranks", {"type": _positive}, "as for train"),
        ("--transport", _TEXT, "as for train"),
        ("--json", _FILE, "write the findings and the facts of each rank as JSON"),
    ], short_for={"transport": "run.transport"})  # fmt: skip


def _doctor(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import doctor

    config = None if options.preset is None else configuration.load(options.preset, _overrides(options))
    return doctor.run(config, options.ranks, options.json, arguments)


if __name__ == "__main__":
    sys.exit(beginning.to_the_end(main))
