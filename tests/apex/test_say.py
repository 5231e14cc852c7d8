"""What is told is told whole or not at all, and never fails."""

import os
import subprocess
import sys

import pytest

from apex import say


def told(code: str, **options) -> subprocess.CompletedProcess:
    """Run ``code`` as a process of its own."""
    command = [sys.executable, "-c", f"from apex import say\n{code}"]
    return subprocess.run(command, capture_output="stdout" not in options, text=True, **options)


def test_each_stream_gets_its_lines_whole(capfd):
    say.say("out"), say.warn("err"), say.say("no end", end="")
    assert capfd.readouterr() == ("out\nno end", "err\n")


def test_a_stream_without_a_descriptor_is_written_to_as_it_is(capsys):
    say.say("out"), say.warn("err")
    assert capsys.readouterr() == ("out\n", "err\n")


ESCAPED = {"ascii": "\\xe4 \\u2588 \\udcff", "latin-1": "ä \\u2588 \\udcff", "utf-8": "ä █ \\udcff"}


@pytest.mark.parametrize("encoding, shown", ESCAPED.items())
def test_what_an_encoding_does_not_have_is_escaped(encoding, shown):
    ended = told(r"say.say('ä █ \udcff')", env=os.environ | {"PYTHONIOENCODING": encoding}, encoding=encoding)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{shown}\n", "")


@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_full_disk_takes_nothing_and_costs_nothing(name):
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [
                sys.executable,
                "-c",
                "from apex import say\nsay.protect(), print('lost'), say.say('x'), say.warn('x')",
            ],
            env={
                key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"
            },  # so that "lost" is held back
            **{"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, name: full},
        )
    assert ended.returncode == 0


def test_a_stream_that_was_closed_before_the_start_is_not_taken_by_a_file():
    code = "say.protect(); f = open('/dev/null'); say.say('x'); say.warn(str(f.fileno() > 2))"
    program = [sys.executable, "-c", f"from apex import say\n{code}"]
    ended = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "True\n")


def test_a_reader_that_is_slow_gets_all_of_a_stream_that_does_not_block():
    read, write = os.pipe()
    os.set_blocking(write, False)
    with subprocess.Popen(
        [sys.executable, "-c", "from apex import say\nsay.say('x' * 300_000)"], stdout=write
    ) as process:
        os.close(write)
        with open(read, "rb") as reader:
            assert reader.read() == b"x" * 300_000 + b"\n"
        assert process.wait() == 0


def test_a_signal_handler_may_tell_while_a_line_is_being_told():
    code = (
        "import signal, os\nsignal.signal(signal.SIGALRM, lambda *_: say.say('handler'))\n"
        "signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)\n"
        "for _ in range(20_000): say.say('line')\nsignal.setitimer(signal.ITIMER_REAL, 0)"
    )
    ended = told(code)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert set(ended.stdout.split("\n")) == {"line", "handler", ""} and ended.stdout.count("line\n") == 20_000


def test_what_is_told_while_somebody_shows_it_comes_to_them_and_the_rest_is_written(capfd):
    with say.divert() as lines:
        say.say("one"), say.warn("two"), say.say("three")
        assert lines.popleft() == (False, "one\n")
        assert capfd.readouterr() == ("", "")
    say.say("four")
    assert capfd.readouterr() == ("three\nfour\n", "two\n")


def test_whoever_shows_nothing_makes_nobody_grow():
    with say.divert() as lines:
        for number in range(30_000):
            say.say(str(number))
        assert len(lines) == 10_000 and lines[-1] == (False, "29999\n")
        lines.clear()


def test_a_line_to_a_terminal_that_has_closed_is_lost():
    import pty

    master, slave = pty.openpty()
    code = (
        "import signal, sys\nfrom apex import say\nsay.protect()\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN); sys.stdin.read(1)\n"
        "say.say('x'); say.warn('x'); print('x')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=slave, stderr=slave
    ) as process:
        os.close(slave), os.close(master)
        process.communicate(b"x")
    assert process.returncode == 0


PRINTS = """
import argparse, sys
say.protect()
print("printed \u2502"), print("not ended \u2502", end=""), print("\u2502", end="", file=sys.stderr)
if sys.argv[1] == "raises":
    raise ValueError("\u2502")
argparse.ArgumentParser().parse_args(["--help"])
"""


def closed_terminal() -> int:
    """Return a descriptor on which every write fails with EIO."""
    master, slave = os.openpty()
    os.close(master)
    return slave


def unread_pipe() -> int:
    """Return a descriptor on which every write fails with EPIPE."""
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full_disk() -> int:
    """Return a descriptor on which every write fails with ENOSPC."""
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("make", [closed_terminal, unread_pipe, full_disk])
@pytest.mark.parametrize("how, status", [("helps", 0), ("raises", 1)])
def test_what_libraries_and_python_itself_print_changes_no_status(make, how, status):
    descriptor = make()
    code = [sys.executable, "-c", f"from apex import say\n{PRINTS}", how]
    assert subprocess.run(code, stdout=descriptor, stderr=descriptor).returncode == status
    ended = subprocess.run(code, stdout=descriptor, stderr=subprocess.PIPE)
    os.close(descriptor)
    assert ended.returncode == status and b"Exception ignored" not in ended.stderr
