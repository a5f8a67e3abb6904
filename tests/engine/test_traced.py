"""What cannot be traced exactly is refused; that other modules are exact is shown elsewhere."""

import pytest
import torch
from pipeline import CPU, config

from engine.configuration import model_of
from engine.model.stage_module import ModelError

POINTS = ("second", "third")
REFUSED = {
    "TupleOutput": r"returns a tuple of 2 values.*return the logits alone",
    "Flat": r"returns a tensor \[32, 256\]; expected logits .*traced_models.py",
    "Branching": r"traced_models.py, line \d+: .*control flow may not depend",
    "CustomBackward": r"traced_models.py, line \d+: .*autograd.Function.*torch's own operations",
    "BackwardHook": r'submodule "second" has a backward hook.*remove the hook',
    "TensorHook": r"traced_models.py, line \d+: .*registers a hook on a tensor",
    "PythonCounter": r"forward changes self.calls.*keep it in a buffer",
    "PythonRandom": r"draws random numbers by Python.*by torch",
    "SharedBuffer": r"traced_models.py\", line \d+.* changes scale .*pieces 0, 1 .*move",
    "WrittenView": r"traced_models.py\", line \d+.*views of each other.*clone",
    "NumberAcross": r"traced_models.py\", line \d+.*only dense tensors pass",
}


def settings(name, world_size, points=POINTS, **rest):
    model = {"preset": f"traced_models:{name}", "split": "trace", "split_points": points}
    return config("1f1b", world_size, 3, microbatch_size=2, **model, **rest)


@pytest.mark.parametrize(("name", "message"), REFUSED.items())
def test_what_tracing_cannot_keep_is_refused_with_its_place(name, message):
    with pytest.raises(ModelError, match=message) as caught:
        model_of(settings(name, 3), CPU)
    assert "\n" not in str(caught.value)


def test_a_split_point_that_is_not_called_is_refused():
    with pytest.raises(ModelError, match='does not call the split point "spare"'):
        model_of(settings("Mixed", 2, ("spare",)), CPU)


def test_a_traced_module_takes_no_other_shape():
    model = model_of(settings("Frame", 1, seq_len=8), CPU)
    stage = model.build_stage([range(3)], 0, CPU)
    stage(torch.zeros(2, 8, dtype=torch.int64))
    with pytest.raises(ModelError, match=r"traced for microbatches of \[2, 8\].*given \[2, 4\]"):
        stage(torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ModelError, match='seq_len cannot be "variable"'):
        model_of(settings("Frame", 1, seq_len="variable", source="text"), CPU)
