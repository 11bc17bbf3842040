"""A vocabulary in shards over several GPUs of one host: `python -m benchmarks.sharded --gpus 2 --out FILE.jsonl`.

There is one process per GPU, connected by NCCL, with its rows of the classifier (`team` has the processes, `worker` is
one of them, `session` its work). Contenders take turns as on one GPU; each number is the largest of all ranks. Peers
that are installed take part. NVLink multicast is off unless NCCL_NVLS_ENABLE=1 is set. With `--device cpu` small sizes
run over gloo, as a test.

Ratios are to the three matrix products of a shard followed by one all-reduce of the hidden states' gradient; in
"overlapped" the all-reduce runs beside the last product. Memory is that of PyTorch's allocator, including gradients,
but without NCCL's buffers. Loss and gradients are compared with float32 ones of one process, at full size.

`python -m benchmarks.sharded plot FILE...` plots time and memory of several runs against the number of GPUs.
"""
