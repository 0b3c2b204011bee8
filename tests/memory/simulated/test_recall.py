"""Shapes that are remembered are those that torch makes, of every operator, layout and mix of arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ballast.memory.simulated import recall
from ballast.memory.simulated.operators import tensors_in
from ballast.memory.striped.chunked_calls import shape_of
from ballast.memory.weights.structure import modules_in
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _nothing_known() -> None:
    recall._found.clear()


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def told(result: Any) -> Any:
    if isinstance(result, (list, tuple)):
        return [told(one) for one in result]
    return result.shape, result.stride(), result.dtype, result.storage_offset(), result.untyped_storage().nbytes()


def assert_as_torch(func: Any, *args: Any, **kwargs: Any) -> None:
    expected = told(func(*args, **kwargs))
    for _ in range(2):  # found out, and remembered
        assert told(recall.remembered(func, args, kwargs)) == expected


LAYOUTS = [
    lambda *shape: empty(*shape),
    lambda *shape: empty(*reversed(shape)).permute(*reversed(range(len(shape)))),
    lambda *shape: empty(*shape[:-1], 2 * shape[-1])[..., ::2],
    lambda *shape: empty(1).expand(*shape),
]
DTYPES = [torch.float32, torch.bfloat16, torch.int64]
CALLS = [
    lambda x, y: (aten.add.Tensor, (x, y)),
    lambda x, y: (aten.mul.Tensor, (x, 2)),
    lambda x, y: (aten.mul.Tensor, (x, 2.0)),
    lambda x, y: (aten.mul.Tensor, (x, True)),
    lambda x, y: (aten.div.Tensor, (x, y)),
    lambda x, y: (aten.cat.default, ([x, y], 1)),
    lambda x, y: (aten.sum.dim_IntList, (x, [1], True)),
    lambda x, y: (aten.clone.default, (x,)),
    lambda x, y: (aten._softmax.default, (x.float(), -1, False)),
    lambda x, y: (aten.gelu.default, (x.float(),)),
    lambda x, y: (aten.max.dim, (x, 0)),
]


@settings(max_examples=200)
@given(st.data())
def test_as_torch_makes_them(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(*[st.integers(1, 4)] * 3))
    x, y = (data.draw(st.sampled_from(LAYOUTS))(*shape).to(data.draw(st.sampled_from(DTYPES))) for _ in range(2))
    func, args = data.draw(st.sampled_from(CALLS))(x, y)
    assert_as_torch(func, *args)


def test_numbers_that_are_equal_are_not_the_same() -> None:
    ints = empty(3, dtype=torch.int64)
    found = [recall.remembered(aten.mul.Tensor, (ints, by), {}).dtype for by in (1, 1.0, True, 1, 1.0)]
    assert found == [torch.int64, torch.float32, torch.int64, torch.int64, torch.float32]


def test_the_default_dtype_counts() -> None:
    ints = empty(3, dtype=torch.int64)
    found = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            found.append(recall.remembered(aten.div.Tensor, (ints, 2), {}).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert found == [torch.float32, torch.float64]


def test_views_and_arguments_given_back_stay_so() -> None:
    x = empty(4, 6)
    for _ in range(2):
        for func, args in ((aten.view.default, (x, [6, 4])), (aten.reshape.default, (x, [24])), (aten.t.default, (x,))):
            assert recall.remembered(func, args, {}).untyped_storage()._cdata == x.untyped_storage()._cdata
        assert recall.remembered(aten.dropout.default, (x, 0.5, False), {}) is x
        assert recall.remembered(aten.add_.Tensor, (x, 1), {}) is x
    parts = recall.remembered(aten.chunk.default, (x, 2), {})
    assert {part.untyped_storage()._cdata for part in parts} == {x.untyped_storage()._cdata}
    copied = [recall.remembered(aten.reshape.default, (x.t(), [24]), {}) for _ in range(2)]
    assert copied[0].untyped_storage()._cdata != copied[1].untyped_storage()._cdata, "each time a tensor of its own"


def test_errors_come_each_time() -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="match"):
            recall.remembered(aten.add.Tensor, (empty(2, 3), empty(2, 4)), {})


def test_values_are_never_remembered() -> None:
    scalar = torch.tensor(3.0)  # stays one with a value: its shape says too little
    assert recall.remembered(aten.mul.Tensor, (empty(2), scalar), {}).shape == (2,)
    assert not recall._found


def test_so_many_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "_MOST", 4)
    for size in range(1, 20):
        recall.remembered(aten.clone.default, (empty(size),), {})
        assert 0 < len(recall._found) <= 4


def test_operators_are_not_asked_again() -> None:
    asked = []

    class Operator:
        _schema = aten.gelu.default._schema

        def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            asked.append(args)
            return aten.gelu.default(*args, **kwargs)

    func = Operator()
    for _ in range(3):
        recall.remembered(func, (empty(2, 3),), {})
    assert len(asked) == 1
    recall.remembered(func, (empty(3, 2).t(),), {})
    assert len(asked) == 2


def test_tensors_are_found_wherever_torch_finds_them() -> None:
    one, two, three = empty(1), nn.Parameter(empty(2)), empty(3)
    values = (
        one,
        [two, {"a": (three, None, 1.5, "text")}],
        torch.Size([2]),
        torch.return_types.max((one, two)),
        slice(1),
    )
    found = [id(leaf) for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    assert [id(tensor) for tensor in tensors_in(values)] == found
    assert len(found) == 5


def test_modules_come_in_the_order_of_torch() -> None:
    shared = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    module = nn.ModuleList([nn.Sequential(shared, nn.Linear(1, 1)), shared, nn.Sequential(nn.ReLU(), shared[0])])
    module.register_module("none", None)
    assert list(map(id, modules_in(module))) == list(map(id, module.modules()))


def test_the_shape_of_a_call_is_asked_of_torch_once_for_each_kind_and_of_closures_each_time() -> None:
    asked: list[tuple] = []

    def closure(x: torch.Tensor, factor: float) -> torch.Tensor:
        asked.append(tuple(x.shape))
        return x * factor

    for _ in range(2):
        for shape, dtype in (((2, 3), torch.float32), ((2, 3), torch.bfloat16), ((3, 2), torch.float32)):
            made = shape_of(torch.mul, (empty(*shape, dtype=dtype), 2), {})
            assert (tuple(made.shape), made.dtype) == (shape, dtype)
    assert shape_of(torch.mul, (empty(2, dtype=torch.int64), 2), {}).dtype == torch.int64
    assert shape_of(torch.mul, (empty(2, dtype=torch.int64), 2.0), {}).dtype == torch.float32, "2 and 2.0 are equal"
    assert shape_of(torch.mul, (empty(2, 3), 2), {}) is shape_of(torch.mul, (empty(2, 3), 2), {})
    assert shape_of(closure, (empty(4), 2.0), {}).shape == shape_of(closure, (empty(4), 2.0), {}).shape
    assert asked == [(4,), (4,)]
