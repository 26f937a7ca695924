"""`python -m iclens.cli`."""

from iclens.cli import main

main()
