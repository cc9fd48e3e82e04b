"""`python -m fedbilevel` is the command line."""

from fedbilevel.cli import main

if __name__ == "__main__":
    main()
