"""``python -m locant``: the command line, where its script is not on the path."""

from locant.cli import main

main()
