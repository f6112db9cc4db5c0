"""``python -m magicube_cutlass``: the same as the ``magicube`` command."""

from magicube_cutlass.cli import main

if __name__ == "__main__":
    main()
