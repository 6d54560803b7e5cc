"""One script per workload, run with `accelerate launch`, and a package with the parts of each.

A script imports its parts, and parts import `common`; nothing imports a script.
"""
