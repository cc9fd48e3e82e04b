"""`python -m fedbilevel` is the command line."""

from fedbilevel.cli import program

if __name__ == "__main__":
    program()
