# SPDX-License-Identifier: Apache-2.0
"""The programs winnow and python -m winnow: output that is lost, and words that are numbers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from winnow import _lib
from winnow.__main__ import main_of_program

TOOL = Path(_lib.path).with_name("winnow")
COMMANDS = {
    "help": "--help",
    "version": "--version",
    "info": "info",
    "info_op": "info key_windows --json",
    "check": "check key_windows --case glm-5.2 --backend cpu",
    "run": "run --tokens 16 --query-rows 1 --backend cpu",
    "run_json": "run --tokens 16 --query-rows 1 --backend cpu --json",
    "plan": "plan --model glm-5.2 --tokens 4096 --ranks 2",
}
BENCH = "bench key_windows --backend cpu --tokens 8 --keys 64 --repeat 3"
READER_GONE = 141

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="this build has no tool")


def shell(command: str, *words: str | Path) -> tuple[int, str]:
    """The exit code of a shell command, whose $@ are the words, and what it wrote to stderr."""
    ran = subprocess.run(["bash", "-c", command, "bash", *words], capture_output=True, text=True)
    return ran.returncode, ran.stderr


def tool(words: str) -> subprocess.CompletedProcess:
    return subprocess.run([TOOL, *words.split()], capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_output_on_a_full_disk_is_an_error(command):
    told = (1, "winnow: cannot write to stdout: No space left on device\n")
    assert shell('"$@" > /dev/full', TOOL, *command.split()) == told


@pytest.mark.parametrize("command", ["--help", "info", COMMANDS["check"]])
def test_a_closed_stdout_is_an_error(command):
    told = (1, "winnow: cannot write to stdout: Bad file descriptor\n")
    assert shell('"$@" >&-', TOOL, *command.split()) == told


@pytest.fixture
def no_matrix_product(tmp_path, monkeypatch):
    """bench finds no OpenBLAS, whose large product would take seconds."""
    (tmp_path / "libopenblas.so.0").touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))


def test_a_file_does_not_take_the_place_of_a_closed_stdout(tmp_path, no_matrix_product):
    words = [*BENCH.split(), "--json", tmp_path / "bench.json"]
    assert shell('"$@" >&- <&-', TOOL, *words)[0] == 1
    assert (tmp_path / "bench.json").read_text().startswith("{")


def assert_file_not_written(words: str) -> None:
    ran = tool(words)
    assert ran.returncode == 1 and "matrix product" in ran.stdout
    assert ran.stderr == "winnow: cannot write '/dev/full': No space left on device\n"


def test_a_json_file_that_cannot_be_written_is_an_error(no_matrix_product):
    assert_file_not_written(f"{BENCH} --json /dev/full")


@pytest.mark.slow
def test_a_rates_file_that_cannot_be_written_is_an_error():
    sizes = "--backend cpu --tokens 1 --keys 16 --repeat 3"
    assert_file_not_written(f"bench --rates /dev/full {sizes}")


def test_complaints_to_a_closed_stderr_leave_the_exit_code():
    assert shell('"$@" 2>&-', TOOL, "no-command")[0] == 2
    assert shell('"$@" > /dev/full 2>&-', TOOL, "info")[0] == 1


@pytest.mark.parametrize("signal", ["default", "ignored"])
def test_a_reader_that_has_gone_ends_the_program_quietly(signal):
    ignore = "trap '' PIPE; " if signal == "ignored" else ""
    # The reader ends before the writer begins.
    command = f'{ignore}{{ sleep 0.1; "$@"; }} | true; exit ${{PIPESTATUS[0]}}'
    assert shell(command, TOOL, "info") == (READER_GONE, "")


def test_without_a_command_the_help_goes_to_stderr():
    ran = tool("")
    assert ran.returncode == 2 and not ran.stdout
    assert ran.stderr == tool("--help").stdout and "Exit code 0" in ran.stderr


def test_memory_that_is_not_there_is_told_with_its_size():
    command = 'ulimit -v 4000000; "$@"'
    words = "run --backend cpu --tokens 16777216 --query-rows 1"
    code, told = shell(command, TOOL, *words.split())
    assert (code, told) == (1, "winnow: out of memory: there are no 4.00 GiB left\n")


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("run --tokens 1e3", "--tokens: '1e3' is not a whole number"),
        ("run --tokens 4k", "--tokens: '4k' is not a whole number"),
        ("run --tokens 0x10", "--tokens: '0x10' is not a whole number"),
        ("run --tokens -5", "--tokens: -5 is not from 16 to 16777216"),
        ("run --tokens 99999999999999999999", "--tokens: 99999999999999999999 is not from 16 to"),
        ("run --seed -1", "--seed: -1 is not from 0 to 18446744073709551615"),
        ("check --seed 18446744073709551616", "--seed: 18446744073709551616 is not from 0 to"),
        ("run --seed 1.5", "--seed: '1.5' is not a whole number"),
        ("bench --threads 1e2", "--threads: '1e2' is not a whole number"),
        ("plan --model glm-5.2 --tokens 8,x --ranks 2", "--tokens: 'x' is not a whole number"),
    ],
)
def test_a_bad_number_is_told_as_such(words, sentence):
    ran = tool(words)
    assert ran.returncode == 2 and ran.stderr.startswith(f"winnow: {sentence}"), ran.stderr


@pytest.mark.parametrize("seed, meant", [("010", 10), ("18446744073709551615", 2**64 - 1)])
def test_seeds_are_decimal(seed, meant):
    ran = tool(f"check key_windows --case glm-5.2 --backend cpu --json --seed {seed}")
    assert f'"seed": {meant},' in ran.stdout, ran.stderr


def ended(words: str, stdout: int | None) -> int:
    """The exit code of python -m winnow, as a fork of this process that has imported torch."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    sys.argv, sys.stdout, sys.stderr = ["winnow", *words.split()], None, open(2, "w", buffering=1)
    if stdout is None:
        os.close(1)
    else:
        os.dup2(stdout, 1)
        sys.stdout = open(1, "w")
    os._exit(main_of_program() or 0)


@pytest.mark.parametrize("words", ["info", "--help", "check --help"])
def test_python_m_winnow_keeps_the_same_rules(words, capfd):
    full = os.open("/dev/full", os.O_WRONLY)
    reader, writer = os.pipe()
    os.close(reader)
    assert [ended(words, stdout) for stdout in (full, None, writer)] == [1, 1, READER_GONE]
    os.close(full)
    os.close(writer)
    reasons = ["No space left on device", "Bad file descriptor"]
    told = "".join(f"winnow: cannot write to stdout: {reason}\n" for reason in reasons)
    assert capfd.readouterr() == ("", told)


def test_python_m_winnow_without_a_command_prints_help(capfd):
    assert ended("", 1) == 2
    out, told = capfd.readouterr()
    assert not out and told.startswith("usage: python -m winnow") and "some of" not in told
    assert "compare every function with plain torch" in told
