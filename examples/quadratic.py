"""Solve a bilevel problem over five clients whose answer is known, and print what it cost."""
