"""`python -m relay`: the console script by another name."""

from relay.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
