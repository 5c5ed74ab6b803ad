"""`python -m colofunc`: the command `colofunc`, where it is not on the path."""

from colofunc.cli import main

if __name__ == "__main__":
    main()
