"""The `apex` command."""

from __future__ import annotations

from launch.run import beginning

if __name__ == "__main__":
    beginning.end_on_interrupt()  # what is imported below takes a while, in which Ctrl-C may come

import argparse
import contextlib
import math
import re
import sys
import time
from pathlib import Path
from typing import Any

from apex import config as configuration
from apex.config import ConfigError
from apex.say import protect, warn
from launch.cli.submit import KINDS
from launch.run import world
from launch.run.options import Parser

_FIRST_RANK_TELLS_S = 120.0  # longest start-up of rank 0 that the other ranks leave room for


def main(argv: list[str] | None = None) -> int:
    """Run the command; return its exit status: 0 done, 1 failed, 2 refused."""
    arguments, options = sys.argv[1:] if argv is None else argv, argparse.Namespace()
    protect()
    try:
        options = _parser().parse_args(arguments)
        if options.run_command is not _train:  # which itself says what a signal does
            beginning.raise_on_interrupt()
        return options.run_command(options, arguments)
    except ConfigError as error:
        return _refuse(_as_typed(str(error), options))
    except KeyboardInterrupt:  # before there was a run to end
        warn("apex: interrupted")
        return 130


def _as_typed(refusal: str, options: argparse.Namespace) -> str:
    """Return the refusal with the options that were typed in place of the fields that they are short for."""
    for name, field in vars(options).get("short_for", {}).items():
        if vars(options)[name] is not None:
            # What is after another source than --set ("preset 'x': run.seed") is not what was typed.
            refusal = re.sub(rf"(?:--set: |(?<!: )){re.escape(field)}\b(?: =)?", f"--{name}", refusal)
    return refusal


def _refuse(refusal: str) -> int:
    """Print the refusal, once for a whole MPI world; return the exit status.

    mpirun ends all ranks as soon as one fails, so the others wait for the first, which tells, and are ended with
    it; only a rank that is refused alone tells by itself. Tasks of srun that are no world end without failing: SLURM
    would end the first before it has told.
    """
    try:
        told = world.from_environment()
    except ConfigError:
        told = world.from_srun()
        if told is not None and told[0] != 0:
            return 0
    if told is not None and told[0] != 0:
        time.sleep(_FIRST_RANK_TELLS_S)
    warn(f"apex: {refusal}")
    return 2


def _parser() -> Parser:
    parser = Parser(prog="apex", description="Ape-X: one agent from many actors, over MPI.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    _add_train(commands)
    _add_playback(commands)
    _add_plot(commands)
    _add_bench(commands)
    _add_compare(commands)
    _add_submit(commands)
    _add_doctor(commands)
    return parser


def _add_train(commands: Any) -> None:
    about = "Train a preset. Outside an MPI world this starts mpirun; inside one (mpirun -n 64 apex train pong) it is one rank."
    train = commands.add_parser(
        "train", help="train a preset", description=about, epilog=_config_help(), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    train.add_argument("preset", nargs="?", help=f"one of: {', '.join(configuration.presets())}; or a .toml file")
    train.add_argument("--resume", metavar="RUN", help="go on with a run: a folder, a name in runs/, or latest; --set still changes")
    train.add_argument(
        "--set", action="append", default=[], metavar="section.field=value", dest="overrides", help="override one field; may be repeated"
    )
    train.add_argument("--ranks", type=_positive, help="processes: one learner, the replay ranks, one evaluator, all others actors")
    train.add_argument("--transport", help="short for --set run.transport=...")
    train.add_argument("--seed", help="short for --set run.seed=...")
    train.add_argument("--tolerate", help="actors: replace acting processes that are lost; short for --set run.fault_tolerance=...")
    train.set_defaults(run_command=_train, short_for=_short_for("transport", "seed") | {"tolerate": "run.fault_tolerance"})


def _add_playback(commands: Any) -> None:
    about = "Play greedy episodes at full scores and print the mean return."
    evaluate = commands.add_parser("eval", help="evaluate a run", description=about)
    play = commands.add_parser("play", help="film a run", description="Film one greedy episode as an animated GIF.")
    for parser in (evaluate, play):
        parser.add_argument("run", help="a folder, a name in runs/, or latest")
        parser.add_argument("--checkpoint", choices=("best", "latest"), help="which weights (default: best; latest if there is none)")
        parser.add_argument("--seed", type=_natural, help="seed of the first episode (default: the run's evaluator.seed)")
    evaluate.add_argument("--episodes", type=_positive, metavar="N", help="episodes (default: the run's evaluator.episodes)")
    evaluate.set_defaults(run_command=_evaluate)
    play.add_argument("--gif", required=True, type=Path, metavar="FILE", help=".gif file to write")
    play.add_argument("--frames", type=_positive, default=1000, help="most frames to film (default: 1000)")
    play.set_defaults(run_command=_play)


def _add_plot(commands: Any) -> None:
    plot = commands.add_parser("plot", help="draw learning curves", description="Draw the learning curves of one or more runs.")
    plot.add_argument("runs", nargs="*", default=["latest"], help="folders, names in runs/, or latest (the default)")
    about = ".png, .pdf or .svg file to write (default: curve.png)"
    plot.add_argument("--out", type=Path, default=Path("curve.png"), metavar="FILE", help=about)
    plot.set_defaults(run_command=_plot)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="measure the parts", description="Measure the parts of this program, and what others use.")
    parts = bench.add_subparsers(dest="part", required=True, metavar="part")
    about = "Measure the priority indexes on one core, beside a tree in plain Python and those of torchrl, cpprb and tianshou if installed."
    index = parts.add_parser("index", help="the priority indexes and their rivals", description=about)
    index.add_argument("--json", type=Path, metavar="FILE", help="write the machine and every row as JSON")
    index.add_argument("--png", type=Path, metavar="FILE", help="draw updates against k, and steps")
    index.add_argument("--quick", action="store_true", help="less than a minute, and less sure (default: about four minutes)")
    index.add_argument("--leaves", type=_natural, default=2**21, metavar="N", help="slots of each index (default: 2097152)")
    index.add_argument("--indexes", type=lambda text: text.split(","), metavar="NAME,NAME", help="only these (default: all there are)")
    index.add_argument("--core", type=_natural, metavar="N", help="the core to run on (default: the last one)")
    index.set_defaults(run_command=_bench_index)
    about = "Train a preset for a while, all roles at once, and tell its rates and what each role takes of the machine."
    system = parts.add_parser("system", help="a whole run of a preset", description=about)
    system.add_argument("--preset", default="pong", help="what is trained (default: pong)")
    system.add_argument("--actors", type=_positive, default=2, metavar="N", help="actors (default: 2)")
    system.add_argument("--seconds", type=_above_zero, default=60.0, metavar="S", help="length of what is measured (default: 60)")
    system.add_argument("--set", action="append", default=[], metavar="section.field=value", dest="overrides", help="as for train")
    system.add_argument("--json", type=Path, metavar="FILE", help="write the machine and the rates as JSON")
    system.set_defaults(run_command=_bench_system, short_for={"actors": "actor.count"})
    about = "Tell whether one replay rank holds these rates at once, with synthetic actors and learner; by default those of the paper."
    rates = parts.add_parser("rates", help="given rates in and out at once", description=about)
    rates.add_argument("--transitions-per-s", type=_above_zero, metavar="N", help="of all actors together (default: 12500)")
    rates.add_argument("--batches-per-s", type=_above_zero, metavar="N", help="of 512 samples (default: 19)")
    rates.add_argument("--seconds", type=_above_zero, metavar="S", help="length of what is measured (default: 60)")
    rates.add_argument("--actors", type=_positive, metavar="N", help="actors (default: 2)")
    rates.add_argument("--transport", metavar="NAME", help="mpi or zmq (default: mpi)")
    rates.add_argument("--json", type=Path, metavar="FILE", help="write the machine and the rates as JSON")
    rates.set_defaults(run_command=_bench_rates)


def _add_compare(commands: Any) -> None:
    about = "Compare the transports on this machine: intake, sampling and a real preset, on free and on busy cores."
    compare = commands.add_parser("compare", help="compare the transports here", description=about)
    names: dict[str, Any] = {"type": lambda text: tuple(text.split(",")), "metavar": "NAME,NAME"}
    compare.add_argument("--transports", help="some of mpi, zmq, mpi-pickle, zmq-pickle (default: all)", **names)
    compare.add_argument("--actors", type=_counts, metavar="N,N", help="actor counts (default: 1,2,4,6)")
    compare.add_argument("--repetitions", type=_positive, metavar="N", help="runs of each (default: 3)")
    compare.add_argument("--seconds", type=_above_zero, metavar="S", help="length of what is measured in a run (default: 3)")
    compare.add_argument("--preset-seconds", type=_above_zero, metavar="S", help="the same for the preset (default: 15)")
    compare.add_argument("--regimes", help="free, busy: a process beside on every core (default: both)", **names)
    compare.add_argument("--workloads", help="some of intake, mixed, preset (default: all)", **names)
    compare.add_argument("--preset", help="what the preset workload trains (default: pong-small)")
    compare.add_argument("--baseline", metavar="NAME", help="the transport of ratio 1 (default: zmq-pickle)")
    compare.add_argument("--json", type=Path, metavar="FILE", help="write the machine and every run as JSON")
    compare.add_argument("--png", type=Path, metavar="FILE", help="draw throughput and ratio by actor count")
    compare.add_argument("--report", type=Path, metavar="FILE", help="write the comparison as Markdown")
    compare.add_argument("--quick", action="store_true", help="less than three minutes, and less sure: one short run of each")
    compare.set_defaults(run_command=_compare)


def _add_submit(commands: Any) -> None:
    about = "Fill the settings of a SLURM script in (launch/slurm), write it to RUNS/submitted, and submit it."
    submit = commands.add_parser("submit", help="train a preset as a SLURM job", description=about)
    submit.add_argument("preset", help="as for train")
    submit.add_argument("--kind", choices=KINDS, help="which script (default: single or many, by --nodes)")
    submit.add_argument("--nodes", type=_positive, metavar="N", help="nodes; heterogeneous: those of the actors (default: 1)")
    submit.add_argument("--ranks-per-node", type=_positive, metavar="N", help="processes of a node (default: as the preset's actors need)")
    submit.add_argument("--cpus-per-rank", type=_positive, metavar="N", help="cores of a process (default: 1)")
    submit.add_argument("--time", help="longest time, as sbatch has it: 24:00:00")
    submit.add_argument("--mem", help="memory of a node, as sbatch has it: 64G")
    submit.add_argument("--partition", metavar="NAME", help="partition; heterogeneous: that of the actors")
    submit.add_argument("--learner-partition", metavar="NAME", help="heterogeneous: partition of the learner")
    submit.add_argument("--gpus", type=_natural, metavar="N", help="GPUs of a node; heterogeneous: of the learner's (there by default 1)")
    submit.add_argument("--setup", metavar="LINE", help="line of shell to run first: 'module load openmpi'")
    submit.add_argument("--launch", metavar="COMMAND", help="what starts ranks on many nodes (default: 'srun --mpi=pmix')")
    submit.add_argument("--sbatch", action="append", metavar="NAME=VALUE", help="another option of sbatch, as qos=low; may be repeated")
    submit.add_argument("--set", action="append", default=[], metavar="section.field=value", dest="overrides", help="as for train")
    submit.add_argument("--transport", help="as for train")
    submit.add_argument("--seed", help="as for train")
    submit.add_argument("--doctor", action="store_true", help="run `apex doctor` in the job instead of the training")
    submit.add_argument("--dry-run", action="store_true", help="only show the script and the call")
    submit.set_defaults(run_command=_submit, short_for=_short_for("transport", "seed"))


def _add_doctor(commands: Any) -> None:
    about = "Look whether a preset would run well here. Under mpirun or srun it looks at that world; by itself it starts one."
    doctor = commands.add_parser("doctor", help="look for what is wrong with this machine or job", description=about)
    doctor.add_argument("preset", nargs="?", help="as for train (default: only look at the machine)")
    doctor.add_argument("--set", action="append", default=[], metavar="section.field=value", dest="overrides", help="as for train")
    doctor.add_argument("--ranks", type=_positive, help="as for train")
    doctor.add_argument("--transport", help="as for train")
    doctor.add_argument("--json", type=Path, metavar="FILE", help="write the findings, and what each rank has seen, as JSON")
    doctor.set_defaults(run_command=_doctor, short_for=_short_for("transport"))


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


def _train(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import train

    overrides = _overrides(options)
    if options.resume is not None:
        return train.resume(options.resume, options.preset, overrides, options.ranks, arguments)
    if options.preset is None:
        raise ConfigError(f"name what is to be trained; {configuration.nearest('', configuration.presets())}")
    return train.train(configuration.load(options.preset, overrides), options.preset, options.ranks, arguments)


def _short_for(*names: str) -> dict[str, str]:
    return {name: f"run.{name}" for name in names}


def _overrides(options: argparse.Namespace) -> list[str]:
    """Return --set with what --transport, --seed and --tolerate are short for."""
    typed = {field: vars(options)[name] for name, field in options.short_for.items()}
    return [*options.overrides, *(f"{field}={value}" for field, value in typed.items() if value is not None)]


def _evaluate(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import playback

    return playback.evaluate(options.run, options.checkpoint, options.episodes, options.seed)


def _play(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import playback

    return playback.play(options.run, options.checkpoint, options.gif, options.seed, options.frames)


def _plot(options: argparse.Namespace, arguments: list[str]) -> int:
    from apex.run_folder import resolve
    from launch.bench import output_file
    from launch.cli.plot import learning_curve

    out = output_file.OutputFile("--out", options.out, output_file.PICTURE)
    runs = {folder.resolve(): folder for folder in map(resolve, options.runs)}  # runs/* also gives runs/latest
    learning_curve(list(runs.values()), out)
    return 0


def _bench_index(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.bench import index

    return index.run(options.json, options.png, options.quick, options.leaves, options.indexes, options.core)


def _bench_system(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.bench import system

    return system.run(options.preset, options.actors, options.seconds, options.overrides, options.json)


def _bench_rates(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.bench import rates

    asked = {name: value for name in rates.FIELDS if (value := getattr(options, name)) is not None}
    return rates.run(rates.Options(**asked), options.json)


def _compare(options: argparse.Namespace, arguments: list[str]) -> int:
    import shlex

    from launch.bench import transports

    asked: dict[str, Any] = {name: value for name in transports.FIELDS if (value := getattr(options, name, None)) is not None}
    chosen = transports.Options(**((transports.QUICK if options.quick else {}) | asked))
    return transports.run(chosen, options.json, options.png, options.report, shlex.join(["apex", *arguments]))


def _submit(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import submit

    asked = {name: value for name in submit.FIELDS if (value := getattr(options, name, None)) is not None}
    return submit.run(submit.Request(**asked | {"overrides": tuple(_overrides(options)), "sbatch": tuple(options.sbatch or ())}))


def _doctor(options: argparse.Namespace, arguments: list[str]) -> int:
    from launch.cli import doctor

    config = None if options.preset is None else configuration.load(options.preset, _overrides(options))
    return doctor.run(config, options.ranks, options.json, arguments)


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


if __name__ == "__main__":
    sys.exit(beginning.to_the_end(main))
