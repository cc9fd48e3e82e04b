"""Clients spread over the devices of processes that trust each other.

`engine` is what a process does outside of a step, `shard` what a device does within one; `layout` says which
device holds which clients, `load` reads only those, and `join` brings the processes together.
"""
