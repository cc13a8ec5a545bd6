"""`python -m irdmafs` is the `irdmafs` command."""

from .cli.command import main

if __name__ == "__main__":
    main(prog_name="irdmafs")
