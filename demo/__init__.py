"""The demo: train one small language model on real text twice, once with PyTorch's loss and once with xent.

Run it from the root of the repository with `python -m demo`; `python -m demo --help` lists the options.
"""
