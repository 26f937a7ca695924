"""The command line: parse, call, print.

Heavy imports wait until a command needs them, so that help answers at once.
"""

import os
import sys
from collections.abc import Callable

from iclens.cli import commands, exchange
from iclens.cli.chains import chains
from iclens.cli.checkup import doctor
from iclens.cli.choice import choose
from iclens.interrupts import STOPPED, listen


def theory(arguments: list[str]) -> int:
    """Reduced models, the race of the circuits, fits of the thresholds."""
    from iclens.cli.theory import COMMANDS as parts

    return choose("iclens theory", parts, arguments)


def score(arguments: list[str]) -> int:
    """Label any model, of iclens or not, by the references at several context lengths."""
    from iclens.cli.score import score as command

    return command(arguments)


COMMANDS: dict[str, Callable[..., int]] = {
    "run": commands.run,
    "cell": commands.cell,
    "status": commands.status,
    "phases": commands.phases,
    "trace": commands.trace,
    "theory": theory,
    "score": score,
    "figure": commands.figure,
    "report": commands.report,
    "chains": chains,
    "export": exchange.export,
    "import": exchange.import_,
    "doctor": doctor,
}
READ_ON = (commands.run, theory, score, exchange.import_, doctor)
"""Commands that parse their own arguments."""


def main() -> None:
    """Entry point of `iclens`.

    Exits with 0, 1 if cells failed, 2 for errors a user can mend, 130 if it was interrupted.
    """
    listen()
    code = dispatch(sys.argv[1:])
    if code == STOPPED:  # jax, interrupted, may crash when Python ends in order
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def dispatch(arguments: list[str]) -> int:
    """Run a command line and return its exit code."""
    if arguments[:1] == ["--version"]:
        from iclens import __version__

        print(f"iclens {__version__}")
        return 0
    name = arguments[0] if arguments and arguments[0] in COMMANDS else ""
    try:
        return choose("iclens", COMMANDS, arguments, read_on=READ_ON)
    except (ValueError, OSError) as error:
        print(f"{f'iclens {name}'.strip()}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"iclens {name}: stopped", file=sys.stderr)
        return STOPPED
