"""The vocabulary in shards over several GPUs of one host: `python -m benchmarks.sharded --gpus 2 --out FILE.jsonl`.

One process a GPU, over NCCL, each with its rows of the classifier (`team` is the processes, `worker` one of them,
`session` what it does). Contenders take turns as on one GPU; a number is the largest of all ranks. Peers that are
installed take part. NVLink multicast is off unless NCCL_NVLS_ENABLE=1 says otherwise. With `--device cpu` small sizes
run over gloo, to see that everything does.

Ratios are to the three products of a shard and one all-reduce of the hidden states' gradient behind them; in
"overlapped" it runs beside the last product. Memory is what PyTorch's allocator hands out, gradients included; NCCL has
buffers besides. Loss and gradients are compared with float32 ones of one process, at full size.

`python -m benchmarks.sharded plot FILE...` draws time and memory against the number of GPUs out of several runs.
"""
