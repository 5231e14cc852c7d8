"""Runs a command in a terminal of its own: ``in_terminal.py COLUMNS FOLDER COMMAND...``

It runs in FOLDER. What the command shows goes to stdout as it is. A file ``close`` in FOLDER closes the
terminal; ``keys`` are what is typed into it. Returns the status of the command.
"""

import contextlib
import fcntl
import os
import pty
import select
import struct
import sys
import termios
from pathlib import Path

LINES = 50


def main(columns: int, folder: Path, command: list[str]) -> int:
    """Run it to its end."""
    pid, master = pty.fork()
    if pid == 0:
        fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        os.chdir(folder)
        os.execvp(command[0], command)
    with contextlib.suppress(OSError):  # EIO: the command has ended
        while not (folder / "close").exists():
            if select.select([master], [], [], 0.05)[0]:
                sys.stdout.buffer.write(os.read(master, 65536))
                sys.stdout.buffer.flush()
            with contextlib.suppress(FileNotFoundError):
                os.write(master, (folder / "keys").read_bytes())
                (folder / "keys").unlink()
    os.close(master)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]))
