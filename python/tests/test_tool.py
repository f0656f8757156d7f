# SPDX-License-Identifier: Apache-2.0
"""The programs winnow and python -m winnow: output that is lost, words that are numbers, JSON,
help, terminals and Ctrl-C."""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
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
    "compare_format": "compare --format",
    "completion": "completion bash",
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


def test_a_rates_file_that_cannot_be_read_is_an_error(tmp_path):
    (tmp_path / "rates").write_text("{]")
    for file, reason in {
        tmp_path: f"cannot read '{tmp_path}'",
        tmp_path / "none": f"cannot read '{tmp_path}/none'",
        tmp_path / "rates": f"{tmp_path}/rates: is not JSON: wrong at byte 2",
    }.items():
        ran = tool(f"plan --model glm-5.2 --tokens 4096 --ranks 2 --rates {file}")
        assert (ran.returncode, ran.stderr) == (1, f"winnow: {reason}\n")


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


def test_an_operator_without_backward_calls_is_named(no_matrix_product):
    ran = tool(f"{BENCH} --backward")
    told = "winnow: --backward: key_windows has no backward calls\n"
    assert (ran.returncode, ran.stderr) == (2, told)


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


def test_more_memory_than_the_machine_has_left_is_not_asked_for(no_matrix_product):
    """Linux would promise it, and kill the program when it is used."""
    ran = tool("bench sparse_attention --backend cpu --tokens 2147483647")
    told = r"winnow: out of memory: 16.0 TiB are needed, \S+ [GM]iB are left\n"
    assert ran.returncode == 1 and re.fullmatch(told, ran.stderr), ran.stderr


def test_what_the_swap_can_take_is_left(no_matrix_product, tmp_path):
    """With another /proc/meminfo, which a user without rights sees in a namespace of its own."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 2097152 kB\nSwapFree:\t    1048576 kB\n")
    mount = f'mount --bind {meminfo} /proc/meminfo && exec "$@"'
    inside = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", mount, "bash"]
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"]).returncode:
        pytest.skip("no namespaces here")
    words = "bench sparse_attention --backend cpu --tokens 2147483647"
    code, told = shell('"$@"', *inside, TOOL, *words.split())
    assert (code, told) == (1, "winnow: out of memory: 16.0 TiB are needed, 2.75 GiB are left\n")


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
        ("bench --tokens 2147483648", "--tokens: 2147483648 is not from 1 to 2147483647"),
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


# ---- JSON: the members that docs/tool.md promises.

RUN = COMMANDS["run"]
MEMBERS = {
    "info": "backends devices operators",
    "info key_windows": "op case device calls",
    COMMANDS["check"]: "seed checks compared failed skipped seconds ok",
    RUN: "backend runs_on case rows documents query_rows seed stages mean_index_loss memory "
    "compared_query_rows compared_keys errors ok",
    BENCH: "backend runs_on threads slots data matrix_product measured",
    COMMANDS["plan"]: "plans",
    "compare --format": "operators",
}


@pytest.mark.parametrize("command", MEMBERS)
def test_json_states_its_schema_and_keeps_it(command, no_matrix_product):
    ran = tool(f"{command} --json")
    assert ran.returncode == 0 and not ran.stderr
    said = json.loads(ran.stdout)
    assert list(said)[:3] == ["schema", "command", "version"]
    assert (said["schema"], said["command"]) == (1, command.split()[0])
    assert said["version"] == _lib.__version__
    promised = MEMBERS[command].split()
    assert set(promised) <= set(said), f"docs/tool.md promises {promised}"
    page = (Path(__file__).parents[2] / "docs" / "tool.md").read_text()
    assert all(f"`{member}`" in page for member in said), "docs/tool.md lists every member"


def test_a_file_of_json_is_written_whole_or_not_at_all(tmp_path, no_matrix_product):
    file = tmp_path / "bench.json"
    file.write_text("before")
    assert shell('"$@" > /dev/full', TOOL, *BENCH.split(), "--json", file)[0] == 1
    assert json.loads(file.read_text())["command"] == "bench"
    assert [path.name for path in tmp_path.glob("bench*")] == ["bench.json"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_link_to_a_file_of_json_stays_a_link(tmp_path, no_matrix_product, exists):
    folder = tmp_path / "results"
    folder.mkdir()
    file, link = folder / "bench.json", tmp_path / "link.json"
    if exists:
        file.write_text("before")
    link.symlink_to("results/bench.json")
    assert shell('"$@"', TOOL, *BENCH.split(), "--json", link)[0] == 0
    assert link.is_symlink() and json.loads(file.read_text())["command"] == "bench"
    assert list(folder.iterdir()) == [file]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "link.json"])
def test_json_for_stdout_goes_where_stdout_goes(tmp_path, monkeypatch, no_matrix_product, name):
    monkeypatch.chdir(tmp_path)
    Path("link.json").symlink_to("/dev/stdout")
    whole = '{ echo before; "$@"; echo after; } > all.txt'
    assert shell(whole, TOOL, *BENCH.split(), "--json", name) == (0, "")
    before, rest = Path("all.txt").read_text().split("\nbackend", 1)
    text, of_json = rest.split("\n{", 1)
    assert before == "before" and "matrix product" in text
    assert json.loads("{" + of_json.removesuffix("after\n"))["command"] == "bench"


def test_json_for_a_pipe_is_read_from_it(tmp_path, no_matrix_product):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    words = [TOOL, *BENCH.split(), "--json", pipe]
    with subprocess.Popen(words, stdout=subprocess.DEVNULL):
        assert json.loads(pipe.read_text())["command"] == "bench"
    assert pipe.is_fifo()


def test_the_page_lists_the_file_format_of_compare():
    page = (Path(__file__).parents[2] / "docs" / "tool.md").read_text()
    for operator in json.loads(tool("compare --format --json").stdout)["operators"]:
        rows = [
            f"| {field['name']} | {field['role']} | {field['value']} |"
            for field in operator["fields"]
        ]
        assert "\n".join([f"### {operator['name']}", "", *FORMAT_HEAD, *rows, ""]) in page


FORMAT_HEAD = ("| name | | shape or value |", "|---|---|---|")


# ---- Help.


def commands() -> list[str]:
    return re.findall(r"^  ([a-z]+) +[A-Z]", tool("--help").stdout, re.MULTILINE)


def test_every_command_has_examples_that_its_parser_takes():
    assert {"info", "compare", "completion"} <= set(commands())
    for command in commands():
        text = tool(f"{command} --help").stdout
        examples = re.findall(rf"^  winnow ({command}\b.*)$", text, re.MULTILINE)
        assert examples, text
        for example in examples:
            # --help comes first, so that nothing runs once the words have been read.
            words = example.split(" >")[0].split()
            assert tool(" ".join([*words, "--help"])).returncode == 0, example


# ---- Terminals.


def on_terminal(words: str | list, until: str = "", **environment: str) -> tuple[int, str]:
    """The exit code and the output of the program, or of a whole command, with stdout and stderr on
    a terminal; Ctrl-C is typed once it has written `until`."""
    main, side = pty.openpty()
    variables = {**os.environ, "TERM": "xterm", **environment}
    command = words if isinstance(words, list) else [TOOL, *words.split()]
    with subprocess.Popen(command, stdin=side, stdout=side, stderr=side, env=variables) as process:
        os.close(side)
        text = ""
        while read := read_terminal(main):
            text += read
            if until and until in text:
                process.send_signal(signal.SIGINT)
                until = ""
    os.close(main)
    return process.returncode, text


def read_terminal(terminal: int) -> str:
    try:
        return os.read(terminal, 4096).decode(errors="replace").replace("\r\n", "\n")
    except OSError:  # the other side has been closed
        return ""


CHECK = "check key_windows --case glm-5.2 --backend cpu"


def test_verdicts_are_coloured_on_a_terminal_alone():
    assert "\033[32mok\033[0m" in on_terminal(CHECK)[1]
    assert "\033" not in tool(CHECK).stdout


@pytest.mark.parametrize("environment", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_colours_can_be_declined(environment):
    code, text = on_terminal(CHECK, **environment)
    assert code == 0 and " ok" in text and "\033" not in text


@pytest.fixture
def heeds_ctrl_c():
    """Programs started in the background of a shell, and what they start, ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_ends_a_bar_and_the_program():
    code, text = on_terminal(
        "run --backend reference --tokens 4096 --query-rows 64", until="%  1 s"
    )
    assert code == 130
    assert "winnow: ends after this call; Ctrl-C again ends it now\n" in text
    assert text.endswith("winnow: interrupted\n")


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_a_second_ctrl_c_ends_the_program_at_once():
    long_call = "run --backend reference --tokens 4096 --query-rows 4096"
    with subprocess.Popen([TOOL, *long_call.split()], stdout=subprocess.PIPE) as process:
        process.stdout.read(1)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=2) == -signal.SIGINT


@pytest.mark.usefixtures("heeds_ctrl_c")
def test_ctrl_c_leaves_no_half_of_a_file(tmp_path, no_matrix_product):
    folder = tmp_path / "results"
    folder.mkdir()
    words = f"bench key_windows --backend cpu --repeat 1000 --json {folder / 'bench.json'}"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([TOOL, *words.split()], **pipes) as process:
        while not list(folder.iterdir()):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, told = process.communicate()
    assert process.returncode == 130 and not out and told.endswith(b"winnow: interrupted\n")
    assert not list(folder.iterdir())


@pytest.mark.slow
def test_the_bar_says_what_time_is_left():
    _, text = on_terminal("check --backend cpu index_topk")
    assert re.search(r"%  \d+ s, \d+ s left  index_topk", text)


MPI = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}
RANKS = "run --context-parallel --tokens 1024 --backend cpu"


def has_mpi() -> bool:
    """Whether the tool has the MPI whose mpirun is here."""
    if not shutil.which("mpirun"):
        return False
    asked = subprocess.run(["mpirun", "--version"], capture_output=True, text=True).stdout
    return (
        "Open MPI" in asked
        and "libmpi.so" in subprocess.run(["ldd", TOOL], capture_output=True, text=True).stdout
    )


@pytest.mark.slow
@pytest.mark.skipif(not has_mpi(), reason="no Open MPI here, or a tool without MPI")
def test_rank_0_shows_a_bar_and_what_time_is_left():
    ranks = ["mpirun", "-n", "2", str(TOOL), *RANKS.split()]
    code, text = on_terminal(ranks, **MPI)
    assert code == 0 and "all 16 within their limits" in re.sub(r"\033\[\d*[mK]", "", text)
    assert re.search(r"%  \d+ s, \d+ s left  (sparse_attention|index|value)_", text)
    # Open MPI hands ranks a pseudo-terminal as stdout whatever its own is.
    piped = subprocess.run(ranks, env=os.environ | MPI, capture_output=True, text=True)
    assert piped.returncode == 0 and "\033" not in piped.stdout + piped.stderr


@pytest.mark.usefixtures("heeds_ctrl_c")
@pytest.mark.skipif(not has_mpi(), reason="no Open MPI here, or a tool without MPI")
def test_ctrl_c_ends_a_step_of_one_rank():
    code, text = on_terminal(RANKS.replace("cpu", "reference"), until="%  1 s", **MPI)
    assert code == 130 and "winnow: interrupted\n" in text


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
