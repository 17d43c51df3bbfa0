"""``python -m keygroups``."""

from keygroups.cli import main

if __name__ == "__main__":
    main()
