"""Train a small model, whose steps the host limits, in three ways: eager, compiled, and as one CUDA graph.

    python examples/small_model.py      # the size of GPT-2, on a GPU
    python examples/small_model.py --layers 2 --width 64 --vocabulary 500 --tokens 64       # a CPU: without the graph

Each way trains with PyTorch's loss and with xent's, from the same weights on the same data, and prints the last loss
and the milliseconds of a step. A graph reads its data from one tensor, into which each step copies new tokens.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.benchmark import Timer

import xent

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Model(nn.Module):
    """A causal language model, and one of two losses."""

    def __init__(self, options: argparse.Namespace, fused: bool) -> None:
        super().__init__()
        width, length = options.width, options.tokens
        self.fused = fused
        self.embedding = nn.Embedding(options.vocabulary, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        heads = max(1, width // 64)
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, options.layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, options.vocabulary, bias=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss of (1, tokens)."""
        hidden = self.blocks(self.embedding(tokens) + self.positions, mask=self.mask, is_causal=True)
        if self.fused:
            return xent.linear_cross_entropy(hidden, self.head.weight, labels)
        return cross_entropy(self.head(hidden).float().flatten(0, 1), labels.flatten())


def make_step(options: argparse.Namespace, way: str, fused: bool, first: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a function that trains on (1, tokens + 1) tokens and returns the loss, after three steps on the first."""
    torch.manual_seed(0)
    model = Model(options, fused).to(DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True, capturable=DEVICE == "cuda")
    held = first.clone()
    run = torch.compile(model, mode="reduce-overhead") if way == "compiled" else model

    def step(tokens: Tensor) -> Tensor:
        held.copy_(tokens)
        loss = run(held[:, :-1], held[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if way != "graph":
        for _ in range(3):
            step(held)
        return step
    side = torch.cuda.Stream()  # a warm-up on a side stream compiles the kernels before the capture
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(held)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(held)

    def replay(tokens: Tensor) -> Tensor:
        held.copy_(tokens)
        graph.replay()
        return loss

    return replay


def main() -> None:
    """Train in each way, and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"layers": 12, "width": 768, "vocabulary": 50257, "tokens": 2048, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    ways = ["eager", "compiled", "graph"][: 3 if DEVICE == "cuda" else 2]
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    options = parser.parse_args()
    draw = torch.Generator(DEVICE).manual_seed(1)
    threads = torch.get_num_threads()
    shape = options.steps, 1, options.tokens + 1
    data = torch.randint(10, shape, generator=draw, device=DEVICE)  # ten classes: the loss falls towards ln 10
    for way in options.ways:
        for name, fused in {"PyTorch": False, "xent": True}.items():
            step = make_step(options, way, fused, data[0])
            for tokens in data:
                loss = step(tokens)
            last = float(loss)  # the timed steps overwrite it
            timer = Timer("step(tokens)", globals={"step": step, "tokens": data[0]}, num_threads=threads)
            print(f"{way:8}  {name:7}  loss {last:.4f}  {timer.blocked_autorange().median * 1e3:8.2f} ms", flush=True)


if __name__ == "__main__":
    main()
