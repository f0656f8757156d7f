# SPDX-License-Identifier: Apache-2.0
"""What runs here, how exactly, how fast.

Exit code 0: all is well; 1: something failed, or the output could not be written; 2: a word of the
command line is wrong, or there is no command; 130: Ctrl-C; 141: the reader of the output has gone.
"""

import argparse
import json
import os
import signal
import sys
from pathlib import Path

try:
    import torch
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    sys.exit("winnow: python -m winnow needs PyTorch from 2.6 on: pip install torch")

import winnow
from winnow import _bench, _check, _lib
from winnow._files import written_whole


def _info() -> None:
    print(f"winnow {winnow.__version__}, torch {torch.__version__}")
    print(f"library {_lib.path}")
    for backend in _lib.BACKENDS:
        reason = _lib.backend_why_not(backend)
        print(f"{backend:10} {'no:  ' + reason if reason else 'yes: ' + _lib.backends()[backend]}")


_OPERATORS = {"check": tuple(_check.CHECKS), "bench": _bench.NAMES}  # of the commands


class _Parser(argparse.ArgumentParser):
    def print_help(self, file=None) -> None:  # that of argparse ignores errors
        print(self.format_help(), end="", file=file)


def _add(commands, name: str, help: str) -> None:
    command = commands.add_parser(name, help=help)
    some = ", ".join(_OPERATORS[name])
    command.add_argument("operators", nargs="*", metavar="OP", help=f"some of {some}; default: all")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: the backend's, or cpu")
    command.add_argument(
        "--backend",
        choices=_lib.BACKENDS,
        help="default: the fastest that reaches the device",
    )


def _add_report(commands) -> None:
    command = commands.add_parser("report", help="write measurements as one HTML page")
    command.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        type=Path,
        help="JSON of winnow run, winnow bench or report --keep",
    )
    command.add_argument("--output", type=Path, default=Path("report.html"), metavar="FILE")
    command.add_argument(
        "--measure",
        action="store_true",
        help="also measure limits, cost over sequence length and a selection here; half a minute",
    )
    command.add_argument(
        "--keep", type=Path, metavar="FILE", help="write what was measured as JSON"
    )
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="to measure on")


class _NotWritten(Exception):
    """A file could not be written; the message says which and why."""


def _write(path: Path, text: str) -> None:
    try:
        with written_whole(path) as file:
            file.write(text.encode())
    except BrokenPipeError:  # path leads to stdout, whose reader has gone
        raise
    except OSError as error:
        why = error.strerror or error  # without a number the error has no words of the system
        raise _NotWritten(f"cannot write {path}: {why}") from error


def _report(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    if not given.files and not given.measure:
        parser.error("report needs a FILE, or --measure")
    if given.keep and not given.measure:
        parser.error("report --keep needs --measure")
    try:
        from winnow.report import measure, page
    except ModuleNotFoundError as error:
        print(f"winnow: a report needs {error.name}: pip install 'winnow[report]'", file=sys.stderr)
        return 1
    try:
        files = [page.read(file) for file in given.files]
        if given.measure:
            if reason := _lib.backend_why_not(given.device):
                raise page.ReportError(reason)
            files.append(measure.measure(given.device))
        if given.keep:
            _write(given.keep, json.dumps(files[-1]))
        _write(given.output, page.page(files))
    except (page.ReportError, _NotWritten) as error:
        print(f"winnow: {error}", file=sys.stderr)
        return 1
    print(f"wrote {given.output}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    parser = _Parser(prog="python -m winnow", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("info", help="version, library and backends")
    _add(commands, "check", "compare every function with plain torch in double")
    _add(commands, "bench", "time calls through PyTorch, and the host's share")
    _add_report(commands)
    given = parser.parse_args(arguments)
    if given.command is None:
        parser.exit(2, parser.format_help())
    if given.command == "info":
        _info()
        return 0
    if given.command == "report":
        return _report(parser, given)
    names = given.operators or list(_OPERATORS[given.command])
    if unknown := sorted(set(names) - set(_OPERATORS[given.command])):
        allowed = ", ".join(_OPERATORS[given.command])
        parser.error(f"no operator {', '.join(unknown)}: must be of {allowed}")
    device = given.device or ("cuda" if given.backend == "cuda" else "cpu")
    for backend in {device, given.backend} - {None}:
        if reason := _lib.backend_why_not(backend):
            print(f"{parser.prog}: {reason}", file=sys.stderr)
            return 1
    if given.command == "check":
        return 0 if _check.run(names, device, given.backend) else 1
    _bench.run(names, device, given.backend)
    return 0


def main_of_program() -> int:
    """`main`, which also fails if its output is lost; Python would notice too late or never."""
    if sys.stdout is None:  # closed by the caller; writing fails as it would there
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")
    try:
        try:
            code = main()
        except SystemExit as exit:  # of argparse, which gives a number
            code = int(exit.code or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("winnow: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        # What is left in the buffer must not fail again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 128 + signal.SIGPIPE
        print(f"winnow: cannot write to stdout: {error.strerror}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main_of_program())
