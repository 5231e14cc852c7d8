"""Lines of Python without tests: the core, and what each option costs. `make sizes` prints them.

Docs/architecture.md holds them.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("apex", "actors", "learner", "replay_rank", "native", "launch", "configs")
OPTIONS = {
    "ZeroMQ": ("apex/transport/zmq*.py", "apex/token.py", "launch/run/spawn.py", "launch/spawn.py"),
    "all roles in one process": ("apex/transport/local.py", "launch/run/local.py"),
    "surviving lost actors": (
        "apex/transport/mpi_spawn.py",
        "learner/supervisor.py",
        "learner/supervisor.py",
        "launch/run/replacement.py",
    ),
    "checkpoints and resuming": (
        "apex/checkpoint.py",
        "apex/state.py",
        "learner/checkpointing.py",
        "replay_rank/persistence.py",
        "launch/run/resume.py",
    ),
    "other priority indexes": ("replay_rank/index/[bnrtw]*.py", "replay_rank/index/_tensor.py"),
    "benchmarks": ("launch/bench/*.py", "native/timing.py"),
    "doctor": ("launch/cli/doctor*.py",),
    "SLURM": ("launch/cli/submit.py",),
    "playback and plots": ("launch/cli/playback.py", "launch/cli/plot.py"),
    "live view, TensorBoard": ("launch/run/view.py", "apex/tensorboard_log.py"),
    "memory and environments checked before the start": (
        "apex/memory_limits.py",
        "launch/run/memory.py",
        "launch/run/preflight.py",
        "apex/envs/trial.py",
    ),
}


def lines(path: Path) -> int:
    """Return the lines of a file."""
    return path.read_text().count("\n")


def sizes() -> dict[str, int]:
    """Return "core", each option, and "all" -> lines."""
    everything = {path: lines(path) for room in ROOMS for path in (ROOT / room).rglob("*.py")}
    found = {}
    for option, patterns in OPTIONS.items():
        paths = {path for pattern in patterns for path in ROOT.glob(pattern)}
        found[option] = sum(everything.pop(path, 0) for path in paths)
    core = sum(everything.values())
    return {"core over MPI": core, **found, "all": core + sum(found.values())}


if __name__ == "__main__":
    for name, count in sizes().items():
        print(f"{count:7,d}  {name}")
