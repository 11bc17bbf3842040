"""A script that patches models and undoes it: classes of other packages are then as they were, and hooks are gone."""

import torch
from torch.optim import optimizer
from transformers import PreTrainedModel
from transformers.trainer_pt_utils import LabelSmoother

from tests.integrations.models import batch, gradients, make
from xent.integrations.transformers import patch, unpatch

__all__ = []


def state() -> tuple[object, object, int]:
    """Return what patch may replace or add to."""
    return LabelSmoother.__call__, PreTrainedModel.post_init, len(optimizer._global_optimizer_post_hooks)


def main() -> None:
    """Compare the state with that before."""
    before = state()
    assert [function.__module__.partition(".")[0] for function in before[:2]] == ["transformers"] * 2
    assert before[2] == 0
    one, other = make("llama"), make("gemma2")
    kept = [dict(vars(module)) for module in (one, one.lm_head)]
    with patch(one):
        patch(other)
        gradients(one, batch())
        torch.optim.SGD(one.parameters(), fused=True).step()
        assert state()[2] == 1
        assert state()[0] is not before[0]
    assert state()[0] is not before[0]
    unpatch(other)
    assert state() == before
    assert [dict(vars(module)) for module in (one, one.lm_head)] == kept
    with patch():
        assert state()[1] is not before[1]
        third = make("llama")
    unpatch(third)
    assert state() == before
    patch(make("llama"))
    seen = []
    optimizer.register_optimizer_step_post_hook(lambda *given: seen.append(1))
    one(**batch()).loss.backward()
    torch.optim.SGD(one.parameters()).step()  # the model is gone, its hook is not
    assert seen == [1]
    with patch(one):
        pass
    assert state()[2] == 1  # that of this test
    print("nothing")


if __name__ == "__main__":
    main()
