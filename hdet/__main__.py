"""`python -m hdet` is the command `hdet`."""

from hdet.app.main import main

if __name__ == "__main__":
    main()
