# SPDX-License-Identifier: Apache-2.0
"""winnow completion: what bash, zsh and fish offer, each asked where it is installed."""

import os
import pty
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from winnow import _lib

TOOL = Path(_lib.path).with_name("winnow")
# What is typed behind "winnow", and what is offered for its last word.
OFFERED = {
    "ch": {"check"},
    "co": {"compare", "completion"},
    "completion ": {"bash", "zsh", "fish", "--help"},
    "check --backend ": {"reference", "cpu", "cuda"},
    "check --b": {"--backend"},
    "check sparse": {"sparse_attention"},
    "run --case glm": {"glm-5.2"},
    "run --seed ": set(),
    "bench --data smooth10": {"smooth10", "smooth1000"},
    "plan --sharding ": {"contiguous", "zigzag"},
    "plan --gpu ": {"h200"},
    "compare jo": {"job.safetensors"},
    "bench --json jo": {"job.safetensors"},
}
# fish shows options once a dash is typed.
OFFERED_BY_FISH = OFFERED | {"completion ": {"bash", "zsh", "fish"}}

pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="this build has no tool")


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not shutil.which(shell), reason=f"no {shell} here")


def script_of(shell: str) -> str:
    return subprocess.run([TOOL, "completion", shell], capture_output=True, text=True).stdout


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The shells' own, with a file to offer."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.safetensors").touch()
    return tmp_path


def offered_by_bash(typed: str) -> set[str]:
    script = """
        source <("$1" completion bash)
        complete -p winnow | grep -q -- '-F _winnow winnow' || exit 1
        shift
        COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
        _winnow && printf '%s\\n' "${COMPREPLY[@]}"
    """
    words = ["winnow", *typed.split(" ")]
    ran = subprocess.run(
        ["bash", "-c", script, "bash", TOOL, *words], capture_output=True, text=True
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    return set(ran.stdout.split())


@pytest.mark.parametrize("typed, offered", OFFERED.items())
def test_bash_completes(typed, offered):
    assert offered_by_bash(typed) == offered


def type_into_zsh(text: str) -> str:
    """What an interactive zsh shows, on a terminal, until it ends."""
    main, side = pty.openpty()
    with subprocess.Popen(
        ["zsh", "-f", "-i"],
        stdin=side,
        stdout=side,
        stderr=side,
        start_new_session=True,
        env=os.environ | {"TERM": "dumb"},
    ):
        os.close(side)
        os.write(main, text.encode())
        shown = b""
        try:
            while read := os.read(main, 4096):
                shown += read
        except OSError:  # the other side has been closed
            pass
    os.close(main)
    return shown.decode(errors="replace")


@needs("zsh")
@pytest.mark.parametrize("way", ["source", "fpath"])
def test_zsh_completes(way, folder):
    """Tab is pressed; a function in the place of compadd notes what it is given."""
    functions, noted = folder / "functions", folder / "noted"
    functions.mkdir()
    (functions / "_winnow").write_text(script_of("zsh"))
    load = f"fpath+=({functions})" if way == "fpath" else ":"
    then = f"source {functions / '_winnow'}" if way == "source" else ":"
    lines = [
        f"PS1= PS2=; {load}; autoload -Uz compinit && compinit -u -D; {then}",
        'compadd() { local -a offered; builtin compadd -O offered "$@"; '
        f'print -rn -- "$offered " >> {noted}; builtin compadd "$@" }}',
        f"winnow() {{ print >> {noted} }}",  # ends the line of what was offered
        *(f"winnow {typed}\t" for typed in OFFERED),
        "exit",
    ]
    shown = type_into_zsh("".join(f"{line}\n" for line in lines))
    assert noted.exists(), shown
    offered = [set(line.split()) for line in noted.read_text().splitlines()]
    assert dict(zip(OFFERED, offered, strict=True)) == OFFERED, shown


@needs("fish")
def test_fish_completes(folder):
    (folder / "winnow.fish").write_text(script_of("fish"))
    asked = "; echo ==; ".join(
        f"complete --do-complete {shlex.quote(f'winnow {typed}')}" for typed in OFFERED
    )
    ran = subprocess.run(
        ["fish", "--no-config", "-c", f"source winnow.fish; {asked}"],
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    # Descriptions stand behind a tab.
    offered = [
        {line.split("\t")[0] for line in answer.splitlines() if line}
        for answer in ran.stdout.split("==\n")
    ]
    assert dict(zip(OFFERED, offered, strict=True)) == OFFERED_BY_FISH


@pytest.mark.parametrize("shell, word", [("zsh", "#compdef winnow"), ("fish", "-l backend")])
def test_scripts_name_options_and_operators(shell, word):
    script = script_of(shell)
    assert word in script and "sparse_attention" in script


def test_an_unknown_shell_is_refused():
    ran = subprocess.run([TOOL, "completion", "csh"], capture_output=True, text=True)
    told = "winnow: no shell 'csh': there are bash, zsh, fish\n"
    assert (ran.returncode, ran.stderr) == (2, told)
