"""How a GPU is measured: one process holds it and serves every contender of a case, and they take turns.

`measure` drives, `worker` is the process, `session` what it does, `clock` and `truth` how it times and judges. The
suite "host" is measured alike on a CPU.
"""
