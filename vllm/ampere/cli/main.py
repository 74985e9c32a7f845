# SPDX-License-Identifier: Apache-2.0
"""Parse the command line, run one command, and turn whatever happens into an exit status."""

import argparse
import difflib
import os
import re
import sys
import traceback
from typing import Iterator, NoReturn

from .. import __version__, envs
from ..errors import AmpereError, UsageError
from . import doctor, env, kernels, patches, plan, profile, serve
from .console import Console

COMMANDS = (doctor, plan, serve, profile, patches, kernels, env)
EXIT_FAULT = 70
EXIT_INTERRUPTED = 130
EXIT_CLOSED_PIPE = 141


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line and a hint."""

    def __init__(self, **settings):
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with the nearest word that would have been right."""
        typed = re.search(r"invalid choice: '([^']*)'|unrecognized arguments: (\S+)", message)
        hint = f"see `{self.prog} --help`"
        if typed:
            word = (typed[1] or typed[2] or "").partition("=")[0]
            message = f"{self.prog}: there is no {word!r}" if word else message
            if near := difflib.get_close_matches(word, sorted(set(_words(self))), n=1):
                hint = f"did you mean {near[0]}? {hint}"
        raise UsageError(message, hint)


def _words(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Every command and option below a parser."""
    for action in parser._actions:
        yield from action.option_strings
        yield from map(str, action.choices or ())
        if isinstance(action.choices, dict):
            for below in action.choices.values():
                yield from _words(below)


def build_parser() -> Parser:
    """The parser of the whole command line."""
    parser = Parser(prog="vllm-ampere", description="DeepSeek-V4.1-Flash on NVIDIA Ampere, over vLLM.")
    parser.add_argument("--version", action="version", version=f"vllm-ampere {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for module in COMMANDS:
        module.register(commands)
    return parser


def _run(words: list[str], console: Console) -> int:
    given: list[str] = []
    if words[:1] in (["serve"], ["profile"]) and "--" in words:
        # argparse cannot tell options before "--" from those behind it once a positional stands between them
        end = words.index("--")
        words, given = words[:end], words[end + 1 :]
    try:
        arguments = build_parser().parse_args(words)
        arguments.given = given
    except SystemExit:
        # --help and --version have printed
        return 0
    console.format = getattr(arguments, "format", console.format)
    return arguments.run(arguments, console)


def main(words: list[str]) -> int:
    """Run the command line `words`; returns the exit status.

    0 fine, 1 findings or refusal, 2 usage, 70 a fault of ours, 130 interrupted, 141 nobody reads the output.
    """
    console = Console()
    try:
        status = _run(words, console)
        sys.stdout.flush()
        return status
    except AmpereError as error:
        console.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        console.error(AmpereError("interrupted"))
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Python flushes stdout once more at exit; that must not fail a second time.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_CLOSED_PIPE
    except Exception as fault:
        if envs.traceback():
            traceback.print_exc()
        console.error(
            AmpereError(
                f"this is a fault of ours: {type(fault).__name__}: {fault}",
                "run it again with VLLM_AMPERE_TRACEBACK=1 and report what it prints, with `vllm-ampere env`",
            )
        )
        return EXIT_FAULT
