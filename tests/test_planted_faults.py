"""The planted faults have their place in the source, and a sample is found; `tests.planted_faults` plants all."""

import pytest

from tests.planted_faults import FAULTS, ROOT, SAMPLE, SOURCE, Fault, is_found


def test_names_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 60
    assert set(SAMPLE) <= set(names)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_text_occurs_once_and_tests_exist(fault: Fault) -> None:
    assert all((ROOT / one.split("::")[0]).is_file() for one in fault.tests if ".py" in one)
    assert (SOURCE / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
    assert fault.new != fault.old


@pytest.mark.full("tests/planted_faults.py")
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.name in SAMPLE], ids=lambda fault: fault.name)
def test_fault_is_found(fault: Fault) -> None:
    assert is_found(fault)
