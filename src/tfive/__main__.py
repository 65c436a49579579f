"""`python -m tfive`: the command line."""

from tfive.cli.app import main

main()
