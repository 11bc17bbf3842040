"""Benchmarks of xent beside other implementations: run `python -m benchmarks` in the root of the repository.

A case is a problem size; a contender is an implementation that is measured on it. On the CPU each measurement runs in
its own process (`worker`), which `measure` controls. On an NVIDIA GPU one process measures all contenders of a case
(`gpu`), except those that need other environment variables. The process of the command line never loads a framework, so
that it takes no memory or threads from the measurement. Results are lines of JSON (`records`); `report`, `tables` and
`plot` show them. To add an implementation, add an entry to a table in `contenders`; for another device, a class in
`devices`; for another size, a case in `suites`.
"""
