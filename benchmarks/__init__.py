"""What xent costs, measured beside what it replaces: run `python -m benchmarks` in the root of the repository.

On the CPU every measurement has a process of its own (`worker`), started and questioned by `measure`. On an NVIDIA GPU
one process holds the device and serves all contenders of a case (`gpu`), but for those that want an environment of
their own. Either way the process of the command line never loads a framework, so it takes neither memory nor threads
from what it measures. Results are lines of JSON (`records`), of which `report`, `tables` and `plot` make what people
read. To compare with another implementation, add its entry to a table in `contenders`; to measure on another device,
add a class to `devices`; to measure another size, add a case in `suites`.
"""
