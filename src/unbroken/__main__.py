"""`python -m unbroken` is the `unbroken` command."""

from unbroken.cli.main import main

main()
