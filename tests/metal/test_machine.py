"""Availability of backend "metal", and the reasons if it is unavailable."""

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest

import xent
from tests.targets import Target
from xent.backends import TABLE
from xent.backends.metal import BACKEND, MetalBackend

PROBE = """
import mlx.core as mx
import xent
logits, classes = mx.zeros((2, 3)), mx.zeros((2,), mx.int32)
print(*(info.reason for info in xent.backends() if (info.name, info.framework) == ("metal", "mlx")))
print(float(xent.cross_entropy(logits, classes)))
try:
    xent.cross_entropy(logits, classes, backend="metal")
except xent.BackendError as error:
    print(error)
"""


@pytest.mark.skipif(mx.metal.is_available(), reason="there is Metal here")
def test_without_metal_auto_selects_mlx() -> None:
    run = subprocess.run([sys.executable, "-W", "error", "-c", PROBE], check=True, capture_output=True, text=True)
    listed, loss, refused = run.stdout.splitlines()
    assert listed.startswith("its kernels are for Apple GPUs, and MLX finds no Metal here (")
    assert float(loss) == pytest.approx(np.log(3))
    assert refused == f"backend 'metal' cannot serve this call: {listed}"


def test_with_metal_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert MetalBackend().missing is None


def test_reason_without_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    info = MetalBackend().info()
    assert (info.reason or "").startswith("MLX cannot be imported: ")
    assert (info.available, info.versions, info.devices) == (False, {}, ())


def test_auto_selects_metal(target: Target) -> None:
    names = [name for name, takes in TABLE if takes == "mlx"]
    assert names[0] == target.name


def test_other_devices_and_float64_are_refused(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    (classes,) = target.arrays(np.array([1, 0]))
    with pytest.raises(xent.BackendError, match="no float64, which backend 'mlx' serves"):
        xent.cross_entropy(mx.zeros((2, 3), mx.float64), classes, backend=target.name)
    monkeypatch.setattr(BACKEND, "devices", lambda: ("other",))
    with pytest.raises(xent.BackendError, match=r"the moment, which backend 'mlx' serves; or mx.set_default_device"):
        xent.cross_entropy(mx.zeros((2, 3)), classes, backend=target.name)
