"""`python -m hdet` is the command `hdet`."""

from hdet.cli import main

if __name__ == "__main__":
    main()
