"""TensorBoard: the rows of the log as scalars, grouped by role, over learner steps."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import socket
import time
from pathlib import Path

from apex.metrics import METRICS

TAGS = {key: metric.tag for key, metric in METRICS.items()}
"""Row key -> TensorBoard tag."""

_numbers = itertools.count()


class Scalars:
    """Writes rows to an event file in the folder ``path``, each at once and whole or not at all.

    TensorBoard's own writer has a thread, which a full disk ends with a traceback.
    """

    def __init__(self, path: str | os.PathLike[str]):
        process = f"{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        self._path = Path(path) / f"events.out.tfevents.{int(time.time()):010d}.{process}"
        self._file: io.FileIO | None = None
        self._evaluations = 0
        with contextlib.suppress(OSError):  # the first row reports it
            self._open()

    def write(self, row: dict) -> None:
        """Write every number in a row at global_step = learner_steps.

        What the evaluator reports is written only when ``evaluations`` has changed: a point on
        that curve is an evaluation, not a row of the log. Raises OSError where the disk does not take it.
        """
        evaluations = row.get("evaluations") or 0
        evaluated, self._evaluations = evaluations != self._evaluations, evaluations
        tagged = [(TAGS.get(key, f"run/{key}"), value) for key, value in row.items() if _is_number(value)]
        shown = [(tag, value) for tag, value in tagged if evaluated or not tag.startswith("evaluator/")]
        values = [{"tag": tag, "simple_value": value} for tag, value in shown]
        file = self._file or self._open()
        _append(file, _record(step=row.get("learner_steps") or 0, summary={"value": values}))

    def close(self) -> None:
        """Close the event file."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> io.FileIO:
        self._path.parent.mkdir(exist_ok=True)
        self._file = open(self._path, "ab", buffering=0)  # noqa: SIM115  closed by close()
        _append(self._file, _record(file_version="brain.Event:2"))
        return self._file


def _append(file: io.FileIO, data: bytes) -> None:
    """Write all of ``data``; what was written of it is taken back where there is no room for the rest."""
    size, rest = file.seek(0, os.SEEK_END), memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        file.truncate(size)
        raise


def _record(**event: object) -> bytes:
    """Return one event as an event file holds it."""
    from tensorboard.compat.proto.event_pb2 import Event  # slow to import, and only the log needs it
    from tensorboard.summary.writer.record_writer import RecordWriter

    data = io.BytesIO()
    RecordWriter(data).write(Event(wall_time=time.time(), **event).SerializeToString())
    return data.getvalue()


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
