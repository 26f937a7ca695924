"""One command among several."""

import inspect
from collections.abc import Callable, Collection

from iclens.names import unknown


def choose(
    program: str,
    commands: dict[str, Callable[..., int]],
    arguments: list[str],
    read_on: Collection[Callable[..., int]] = (),
) -> int:
    """Run the command that the first argument names; returns its exit code.

    The others are parsed into its parameters, but for those in `read_on`, which parse them.
    Raises `ValueError` for an unknown name.
    """
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: {program} COMMAND ...\n")
        for name, command in commands.items():
            print(f"  {name:10} {(inspect.getdoc(command) or '').splitlines()[0]}")
        print(f"\n{program} COMMAND --help says more.")
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in commands:
        raise ValueError(unknown("command", name, commands))
    if commands[name] in read_on:
        return commands[name](rest)
    import tyro

    code: int = tyro.cli(commands[name], args=rest, prog=f"{program} {name}")
    return code
