"""The function of docs/evaluate.md equals the plain way, with all logits."""

import re
from typing import Any

import torch

from tests.packaging.tree import ROOT


def test_scores_equal_the_plain_way() -> None:
    names: dict[str, Any] = {}
    page = (ROOT / "docs" / "evaluate.md").read_text(encoding="utf-8")
    exec(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0], names)
    for seed in range(5):
        torch.manual_seed(seed)
        hidden, head = torch.randn(6, 12, 4), torch.randn(7, 4)
        log_softmax = (hidden @ head.t()).log_softmax(-1)
        tokens, start = torch.randint(7, (6, 12)), torch.randint(3, 9, (6,))
        for row in range(3):  # their continuations are greedy
            tokens[row, 1:] = log_softmax[row, :-1].argmax(-1)
        stop = torch.randint(9, 12, (6,))
        tokens[torch.arange(12) >= stop[:, None]] = -100
        log_likelihood, counts, is_greedy = names["scores"](hidden, head, tokens, start)
        for row in range(6):
            positions = torch.arange(start[row], stop[row])
            predicted, expected = log_softmax[row, positions - 1], tokens[row, positions]
            plain = predicted.gather(1, expected[:, None]).sum()
            torch.testing.assert_close(log_likelihood[row], plain, rtol=1e-5, atol=1e-5)
            assert counts[row] == len(positions)
            assert is_greedy[row] == (predicted.argmax(-1) == expected).all()
        assert is_greedy[:3].all()
        assert not is_greedy.all()
