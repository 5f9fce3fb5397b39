"""`python -m nestling` is the `nestling` command."""

from nestling.cli.main import main

if __name__ == "__main__":
    main()
