"""Measurements on a GPU: one process runs all contenders of a case, in turns.

`measure` controls the process, `worker` is its main loop, `session` runs a case, `clock` measures times, and `truth`
computes errors. The suite "host" is measured in the same way on a CPU.
"""
