"""What xent costs, measured beside what it replaces: run `python -m benchmarks` in the root of the repository.

Every measurement has a process of its own (`worker`), started and questioned by `measure`; the process of the command
line never loads a framework, so it takes neither memory nor threads from what it measures. To compare with another
implementation, add its entries to the table in `contenders`; to measure on another device, add one entry to the table
in `devices`; to measure another size, add a case in `cases`.
"""
