"""`apex submit`: fills in a SLURM script, writes it, and submits it."""

from __future__ import annotations

import dataclasses
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from apex import config as configuration
from apex import topology as topologies
from apex.config import Config, ConfigError
from apex.say import say
from apex.topology import ACTOR

SCRIPTS = Path(__file__).resolve().parents[1] / "slurm"
KINDS = ("single", "many", "heterogeneous", "requeue", "compare")
_NEXT_PART = "#SBATCH hetjob\n"  # between the parts of a heterogeneous job
_MANY = "srun --mpi=pmix"  # starts ranks on many nodes, unless --launch names another command


@dataclass(frozen=True)
class Request:
    """The options of `apex submit`; None keeps what the script or the preset has."""

    preset: str
    overrides: tuple[str, ...] = ()
    kind: str | None = None
    nodes: int = 1
    ranks_per_node: int | None = None
    cpus_per_rank: int = 1
    time: str | None = None
    mem: str | None = None
    partition: str | None = None
    learner_partition: str | None = None
    gpus: int | None = None
    setup: str | None = None
    launch: str | None = None
    sbatch: tuple[str, ...] = ()
    doctor: bool = False
    dry_run: bool = False


FIELDS = tuple(field.name for field in dataclasses.fields(Request))


def run(request: Request) -> int:
    """Write the script and submit it, or with ``dry_run`` only print both; return the exit status."""
    config = configuration.load(request.preset, request.overrides)
    kind = request.kind or ("single" if request.nodes == 1 else "many")
    _refuse_contradictions(request, kind, config)
    script = (SCRIPTS / f"{kind}.sbatch").read_text()
    text = fill(script, _options(request, kind, config), _variables(request, kind, config))
    arguments = _arguments(request, kind)
    if request.dry_run:
        say(f"{text}\n# sbatch THIS_FILE {shlex.join(arguments)}")
        return 0
    if shutil.which("sbatch") is None:
        raise ConfigError("sbatch is not installed here; use a login node of the cluster, or --dry-run")
    path = _write(text, config, f"{kind}-{Path(request.preset).name.removesuffix('.toml')}")
    return _sbatch(path, arguments)


def _sbatch(path: Path, arguments: list[str]) -> int:
    done = subprocess.run(["sbatch", str(path), *arguments], stdin=subprocess.DEVNULL)
    say(f"apex: {'submitted' if done.returncode == 0 else 'sbatch refused'} {path}")
    return done.returncode


def _refuse_contradictions(request: Request, kind: str, config: Config) -> None:
    """Raise :class:`ConfigError` if the job could not run."""
    if kind in ("single", "compare") and request.nodes != 1:
        others = "--kind many, heterogeneous or requeue"
        raise ConfigError(f"--kind {kind} is for one node; for --nodes {request.nodes} use {others}")
    if kind == "compare" and (request.overrides or request.doctor):
        left_out = "--set, --seed, --transport and --doctor"
        raise ConfigError(f"--kind compare measures an unchanged preset; leave out {left_out}")
    if kind == "requeue" and request.doctor:
        raise ConfigError("--doctor has nothing to requeue; leave out --kind requeue")
    if kind != "heterogeneous" and request.learner_partition is not None:
        raise ConfigError("--learner-partition is for --kind heterogeneous; other kinds have one --partition")
    transport, needs_mpi = config.run.transport, kind == "heterogeneous" or request.nodes > 1
    if transport == "local" or (transport == "zmq" and needs_mpi):
        use = "use mpi, or --nodes 1 with zmq"
        raise ConfigError(f"run.transport = '{transport}' cannot run on many nodes of SLURM; {use}")
    topologies.make(config, _ranks(request, kind, config))


def _ranks(request: Request, kind: str, config: Config) -> int:
    """Return the number of ranks of the job."""
    first_part = _before_actors(config) if kind == "heterogeneous" else 0
    return first_part + request.nodes * _per_node(request, kind, config)


def _before_actors(config: Config) -> int:
    """Return the number of ranks in the first part of a heterogeneous job: all but the actors."""
    return topologies.make(config).rank(ACTOR, 0)


def _per_node(request: Request, kind: str, config: Config) -> int:
    """Return the ranks per node (heterogeneous: per actors' node), by default enough for the preset."""
    wanted = config.actor.count if kind == "heterogeneous" else topologies.make(config).size
    return request.ranks_per_node or -(-wanted // request.nodes)


def _options(request: Request, kind: str, config: Config) -> list[dict[str, str | None]]:
    """Return the options of sbatch for each part of the job."""
    ranks, cpus = _per_node(request, kind, config), request.cpus_per_rank
    common = _given(time=request.time, mem=request.mem)
    more: dict[str, str | None] = dict(_sbatch_option(text) for text in request.sbatch)
    if request.gpus is not None:
        more = {"gres": f"gpu:{request.gpus}" if request.gpus else None} | more
    if kind in ("single", "compare"):
        sized = {"cpus-per-task": ranks * cpus}
    else:
        sized = {"nodes": request.nodes, "ntasks-per-node": ranks, "cpus-per-task": cpus}
    own: dict[str, str | None] = {**common, **_given(partition=request.partition, **sized)}
    if kind != "heterogeneous":
        return [own | more]
    learner = {"ntasks": _before_actors(config), "cpus-per-task": config.learner.threads}
    return [common | _given(partition=request.learner_partition, **learner) | more, own]


def _given(**options: object) -> dict[str, str]:
    """Return the options that are not None, as text."""
    return {name: str(value) for name, value in options.items() if value is not None}


def _sbatch_option(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[a-z][a-z-]*", name) or (equals and not value):
        raise ConfigError(f"--sbatch {text}: write an option of sbatch without its dashes, like qos=low")
    return name, value


def _variables(request: Request, kind: str, config: Config) -> dict[str, str]:
    """Return the shell variables to set in the script."""
    beside = Path(sys.executable).parent / "apex"
    apex = os.environ.get("APEX") or (str(beside) if beside.is_file() else None)
    is_requeue, default_launch = kind == "requeue", _MANY if request.nodes > 1 else None
    return _given(
        SETUP=request.setup, APEX=apex,
        LAUNCH=request.launch or (default_launch if is_requeue else None),
        COMMAND="doctor" if request.doctor else None,
        RANKS=_per_node(request, kind, config) if kind == "single" else None,
        RUNS=config.run.directory if is_requeue else None,
    )  # fmt: skip


def _arguments(request: Request, kind: str) -> list[str]:
    """Return the arguments of the script."""
    if kind == "compare":
        return ["--preset", request.preset]
    return [request.preset, *(part for text in request.overrides for part in ("--set", text))]


def fill(text: str, parts: list[dict[str, str | None]], variables: dict[str, str]) -> str:
    """Return the script ``text`` with each part's options and the variables set; None removes an option."""
    for value in [*(value for part in parts for value in part.values()), *variables.values()]:
        if value is not None and not value.isprintable():
            raise ConfigError(f"{value!r} has characters that no line of a job script can hold")
    sections = text.split(_NEXT_PART)
    filled = _NEXT_PART.join(_with_options(*pair) for pair in zip(sections, parts, strict=True))
    for name, value in variables.items():
        line = f"{name}={shlex.quote(value)}"
        escaped = line.replace("\\", r"\\")
        filled = re.sub(rf"^{name}=.*$", escaped, filled, flags=re.MULTILINE)
    return filled


def _with_options(section: str, options: dict[str, str | None]) -> str:
    """Return a section with each option on its line, commented out or not, or after the last option."""
    lines = section.splitlines(keepends=True)
    for name, value in options.items():
        line = f"#SBATCH --{name}" + (f"={value}" if value else "") + "\n"
        found = [at for at, old in enumerate(lines) if re.match(rf"##?SBATCH --{name}(=|\s)", old)]
        if value is None:
            lines = [old for at, old in enumerate(lines) if at not in found]
        elif found:
            lines[found[0]] = line
        else:
            last = max(at for at, old in enumerate(lines) if old.startswith("#SBATCH"))
            lines.insert(last + 1, line)
    return "".join(lines)


def _write(text: str, config: Config, name: str) -> Path:
    """Write the script beside the runs, as a record of the job."""
    folder = Path(config.run.directory) / "submitted"
    path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.sbatch"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    except OSError as error:
        folder_name = config.run.directory
        raise ConfigError(f"run.directory = '{folder_name}' cannot be written to: {error.strerror}") from None
    return path
