"""I and W together do what autograd does in one go, whatever a stage is made of."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls, no-warn-return-any

import contextlib
import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from models import Of
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.pytorch_utils import Conv1D

from engine.model.chain import ChainPiece, ChainStage
from engine.model.stage_module import TensorSpec
from engine.run.recomputation import recompute_layers
from engine.run.stage import Stage

WIDTH = 8
SHAPE = (2, 3, WIDTH)
PLAIN = contextlib.nullcontext()
BFLOAT16 = torch.autocast("cpu", torch.bfloat16)
SECOND = "modules_of_pieces.1"  # the second piece
Gradients = dict[str, Tensor | None]
ORDERS = (
    "F0 F1 I0 W0 I1 W1",
    "F0 F1 F2 I0 I1 I2 W0 W1 W2",
    "F0 F1 F2 I0 B1 W0 I2 W2",
    "F0 F1 B0 B1",
)

pytestmark = pytest.mark.filterwarnings("ignore:grad and param do not obey")  # a transposed weight


@pytest.fixture(autouse=True)
def _same_numbers_each_time() -> None:
    torch.manual_seed(0)


def chain(*modules: nn.Module, is_first: bool = False) -> ChainStage:
    """A stage of pieces in a row."""
    names = [f"value {i}" for i in range(len(modules) + 1)]
    pieces = [ChainPiece(m, f"{i}.", (names[i],), (names[i + 1],)) for i, m in enumerate(modules)]
    layers = range(len(modules))
    ends = (names[0],), (names[-1],)
    return ChainStage(pieces, layers, *ends, {}, is_first=is_first, is_last=False)


def stage_of(module, dtype=torch.float64, autocast=PLAIN, *, is_split=True):
    """A stage that sends tensors of some dtype."""
    return Stage(module, (TensorSpec(SHAPE, dtype),), autocast, is_split=is_split)


def drawn(num, shape=SHAPE, dtype=torch.float64):
    return [torch.randn(shape, dtype=dtype) for _ in range(num)]


def gradients_of(module: nn.Module) -> Gradients:
    return {name: p.grad for name, p in module.named_parameters()}


def names_with_gradient(module):
    return {name for name, gradient in gradients_of(module).items() if gradient is not None}


def run(stage: Stage, order: str, inputs, given) -> Gradients:
    """Execute actions such as `F0 I0 W0`; returns the gradients of parameters and of `input 0`."""
    found: Gradients = {}
    for action in order.split():
        op, microbatch = action[0], int(action[1:])
        if op == "F":
            stage.forward(microbatch, (inputs[microbatch].clone(),), None)
        elif op == "W":
            stage.backward_weight(microbatch)
        else:
            backward = stage.backward_input if op == "I" else stage.backward
            returned = backward(microbatch, (given[microbatch].clone(),))
            found |= {f"input {microbatch}": x for x in returned}
    return {**gradients_of(stage.module), **found}


def run_plain(module: nn.Module, inputs, given, autocast=PLAIN) -> Gradients:
    """The same by autograd.

    Not by its `backward`, whose accumulation in place is part of what is tested.
    """
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    found: Gradients = gradients_of(module)
    for microbatch, (x, gradient) in enumerate(zip(inputs, given, strict=True)):
        leaf = x.clone().requires_grad_()
        with autocast:
            (output,) = module(leaf)
        wanted = [leaf, *trained.values()]
        own, *rest = torch.autograd.grad(output, wanted, gradient, allow_unused=True)
        found[f"input {microbatch}"] = torch.zeros_like(leaf) if own is None else own
        for name, more in zip(trained, rest, strict=True):
            before = found[name]
            found[name] = before if more is None else more if before is None else before + more
    return found


def assert_same(ours: Gradients, expected: Gradients, tolerance=1e-12):
    """`tolerance` is absolute and, where it is coarse, relative too."""
    rtol = tolerance if tolerance > 1e-12 else 0
    torch.testing.assert_close(ours, expected, rtol=rtol, atol=tolerance)


def assert_exact(pieces, order="F0 F1 I0 I1 W1 W0", shape=SHAPE, *, recompute=False):
    """A stage of these modules gets the gradients of plain autograd."""
    module = chain(*pieces).double()
    plain = copy.deepcopy(module)
    if recompute:
        recompute_layers(module)
    num_microbatches = order.count("F")
    inputs, given = drawn(num_microbatches, shape), drawn(num_microbatches, shape)
    stage = stage_of(module)
    assert_same(run(stage, order, inputs, given), run_plain(plain, inputs, given))
    assert stage.num_held == 0


class Residual(nn.Module):
    """x + f(x)"""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.f = nn.Sequential(*modules)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f(x)


def linear(*, bias: bool = True) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, bias=bias)


def linears(names: str, **options: bool) -> dict[str, nn.Linear]:
    return {name: linear(**options) for name in names.split()}


def queries_keys_values(**options: bool) -> nn.Module:
    """Three linears of one input."""
    return Of(
        lambda own, x: functional.scaled_dot_product_attention(own.q(x), own.k(x), own.v(x)),
        **linears("q k v", **options),
    )


def tied() -> nn.Module:
    """Two linears of one weight."""
    module = Of(lambda own, x: own.b(own.a(x).tanh()), **linears("a b"))
    module.b.weight = module.a.weight
    return module


def functional_first() -> nn.Module:
    """A linear whose weight is used directly, too: before autocast has seen it."""
    return Of(
        lambda own, x: own.of(functional.linear(x, own.of.weight).tanh()),
        of=linear(),
    )


def functional_last() -> nn.Module:
    """The same after autocast has seen it."""
    return Of(
        lambda own, x: functional.linear(own.of(x).tanh(), own.of.weight) + own.of.weight[0],
        of=linear(),
    )


def with_unused() -> nn.Module:
    """A linear whose output leads nowhere, and one that is never called."""
    return Of(lambda own, x: (own.dropped(x), own.used(x))[1], **linears("used dropped idle"))


class Learned(nn.Module):
    """Adds learned positions, whose gradient is a view of the output gradient of what is before."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(SHAPE[1:]))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.positions[None]


class FlatLearned(Learned):
    """The gradients of its input and of the positions are views of one tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.flatten(1) + self.positions[None].flatten(1)).view(x.shape)


class SumOfTwo(nn.Module):
    """The gradients of its parameters are views of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(SHAPE[1:])) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.a.flatten() + self.b.flatten()).view(SHAPE[1:])


def of_constants() -> nn.Module:
    """A linear of a parameter, and one of a constant."""
    return Of(
        lambda own, x: x * own.of_queries(own.queries) + own.of_constant(own.constant),
        queries=nn.Parameter(torch.randn(WIDTH)),
        constant=nn.Buffer(torch.randn(WIDTH)),
        **linears("of_queries of_constant"),
    )


def by_keyword() -> nn.Module:
    return Of(lambda own, x: own.of(input=x), of=linear())


def sensitivity() -> nn.Module:
    """Its output contains a gradient of its own."""

    def forward(own: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x if x.requires_grad else x.clone().requires_grad_()
            y: Tensor = own.b(own.a(inner).tanh())
            (slope,) = torch.autograd.grad(y.square().sum(), inner, create_graph=True)
        return y + slope

    return Of(forward, **linears("a b"))


def slope() -> nn.Module:
    """A gradient of its own is a constant to it."""

    def forward(own: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(own.a(inner).tanh().sum(), inner)
        result: Tensor = own.b(own.a(x) * slope)
        return result

    return Of(forward, **linears("a b"))


def vectorised() -> nn.Module:
    """Its linear runs under vmap."""
    return Of(lambda own, x: torch.vmap(own.of)(x), of=linear())


class Ignored(torch.autograd.Function):
    """Passes x on and no gradient back."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def undefined() -> nn.Module:
    """A linear that the backward reaches without a gradient."""
    return Of(lambda own, x: own.used(x) + Ignored.apply(own.ignored(x)), **linears("used ignored"))


class Half(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def hooked() -> nn.Linear:
    """Its weight's gradients are masked."""
    own = linear()
    own.weight.register_hook(torch.triu)
    return own


def halved() -> nn.Linear:
    own = linear()
    parametrize.register_parametrization(own, "weight", Half())
    return own


def overridden() -> nn.Module:
    """An instance with a forward of its own."""
    own: nn.Module = linear()
    own.forward = lambda x: functional.linear(x, own.get_parameter("weight")).exp()
    return own


def transposed() -> nn.Linear:
    """A weight that is not contiguous."""
    own = linear()
    own.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t())
    return own


def computed_bias() -> nn.Linear:
    """A linear whose bias is made from another parameter before each forward."""
    own = linear()
    own.raw = nn.Parameter(torch.randn(WIDTH))
    del own.bias

    def make(module, _args):
        module.bias = module.raw.exp()

    make(own, ())
    own.register_forward_pre_hook(make)
    return own


def conv1d() -> Conv1D:
    return Conv1D(WIDTH, WIDTH)


KINDS: dict[str, Callable[[], Sequence[nn.Module]]] = {
    "without bias": lambda: [linear(bias=False), nn.Tanh(), linear(bias=False)],
    "layers": lambda: [
        Residual(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
        for _ in range(2)
    ],
    "shared input": lambda: [nn.LayerNorm(WIDTH), queries_keys_values()],
    "tied linears": lambda: [linear(), tied()],
    "functional use too": lambda: [functional_last(), linear(), functional_first()],
    "unused": lambda: [linear(), with_unused()],
    "frozen weight": lambda: [linear(), frozen(linear(), "weight"), linear()],
    "frozen bias": lambda: [linear(), frozen(linear(), "bias"), linear()],
    "frozen linear": lambda: [linear(), frozen(linear(), "weight", "bias"), linear()],
    "learned positions": lambda: [Residual(linear()), Learned(), Residual(linear())],
    "flat positions": lambda: [FlatLearned(), linear(), FlatLearned()],
    "sum of two parameters": lambda: [linear(), SumOfTwo()],
    "linears of constants": lambda: [linear(), of_constants()],
    "called by keyword": lambda: [by_keyword()],
    "conv1d by keyword": lambda: [Of(lambda own, x: own.of(x=x), of=conv1d()), linear()],
    "parametrized": lambda: [halved(), linear()],
    "no gradient arrives": lambda: [linear(), undefined()],
    "in-place activation": lambda: [nn.Sequential(linear(), nn.ReLU(inplace=True), linear())],
    "transposed weight": lambda: [transposed(), linear()],
    "conv1d": lambda: [Conv1D(16, WIDTH), nn.Tanh(), Conv1D(WIDTH, 16), frozen(conv1d(), "bias")],
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_autograd_in_any_order(kind, order):
    shape = (1, *SHAPE[1:])  # with a batch of one, more gradients are views of others
    assert_exact(KINDS[kind](), order, shape)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layers_get_the_same_gradients(kind):
    assert_exact(KINDS[kind](), "F0 F1 F2 I0 B1 I2 W2 W0", recompute=True)


def assert_as_plain_autocast(module, order="F0 I0 W0", tolerance=2e-2, *, recompute=False):
    plain = copy.deepcopy(module)
    if recompute:
        recompute_layers(module)
    num_microbatches = order.count("F")
    inputs = drawn(num_microbatches, dtype=torch.float32)
    with torch.no_grad(), BFLOAT16:
        (output,) = copy.deepcopy(plain)(inputs[0].clone())
    given = drawn(num_microbatches, dtype=output.dtype)
    ours = run(stage_of(module, output.dtype, BFLOAT16), order, inputs, given)
    assert_same(ours, run_plain(plain, inputs, given, BFLOAT16), tolerance)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_gradients_are_those_of_plain_autocast(kind, recompute):
    """But for the order of sums: within a product, and where a weight is used twice."""
    module = chain(*KINDS[kind]())
    assert_as_plain_autocast(module, "F0 F1 F2 I0 I1 W1 B2 W0", recompute=recompute)


def test_under_autocast_products_are_plain_autocasts_to_the_bit():
    module = chain(linear(), nn.Tanh(), linear(bias=False), nn.LayerNorm(WIDTH))
    assert_as_plain_autocast(module, tolerance=0)


def test_under_autocast_an_input_that_has_changed_is_cast_again():
    def forward(own: Any, x: Tensor) -> Tensor:
        x = x + 1
        result: Tensor = own.a(x) + own.b(x.mul_(2))
        return result

    assert_as_plain_autocast(chain(Of(forward, **linears("a b"))))


def test_a_linear_that_is_frozen_later_gets_no_gradient():
    module = chain(linear(), linear()).double()
    plain = copy.deepcopy(module)
    stage = stage_of(module)
    for each in (module, plain):
        frozen(each, f"{SECOND}.weight", f"{SECOND}.bias")
    inputs, given = drawn(1), drawn(1)
    assert_same(run(stage, "F0 I0 W0", inputs, given), run_plain(plain, inputs, given))


UNUSUAL = [hooked, overridden, computed_bias, sensitivity, slope, vectorised]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("make", UNUSUAL)
def test_unusual_uses_of_linears_fall_back_to_autograd(make, recompute):
    """Built twice, since a copy would lack what makes it unusual."""
    module, plain = (chain(linear(), make()).double() for _ in range(2))
    plain.load_state_dict(module.state_dict())
    if recompute:
        recompute_layers(module)
    inputs, given = drawn(2, (4, WIDTH)), drawn(2, (4, WIDTH))
    ours = run(stage_of(module), "F0 F1 I0 B1 W0", inputs, given)
    assert_same(ours, run_plain(plain, inputs, given))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("leading", [(), (1,), (5,), (0,), (2, 3), (2, 0), (1, 1), (2, 1, 3, 2)])
def test_any_leading_dimensions(leading, bias):
    pieces = [nn.Linear(WIDTH, 5, bias=bias), nn.Tanh(), nn.Linear(5, WIDTH, bias=bias)]
    assert_exact(pieces, "F0 F1 F2 I0 I1 B2 W0 W1", (*leading, WIDTH))


def test_bfloat16_parameters_keep_their_dtype():
    module = chain(linear(), linear()).to(torch.bfloat16)
    plain = copy.deepcopy(module)
    inputs, given = drawn(2, dtype=torch.bfloat16), drawn(2, dtype=torch.bfloat16)
    ours = run(stage_of(module, torch.bfloat16), "F0 F1 I0 I1 W0 W1", inputs, given)
    assert_same(ours, run_plain(plain, inputs, given), tolerance=5e-2)


def test_a_bare_linear_is_split_where_layers_are_recomputed_too():
    module = chain(linear(), nn.Tanh()).double()
    recompute_layers(module)
    stage = stage_of(module)
    run(stage, "F0 I0", drawn(1), drawn(1))
    assert names_with_gradient(module) == set()
    stage.backward_weight(0)
    assert len(names_with_gradient(module)) == 2


def test_the_first_stage_runs_its_inner_layers_in_i_and_returns_nothing():
    pieces = nn.Embedding(16, WIDTH), linear(), nn.LayerNorm(WIDTH)
    module = chain(*pieces, is_first=True).double()
    stage = stage_of(module)
    after_i = run(stage, "F0 I0", [torch.randint(16, (2, 3))], drawn(1))
    assert after_i.keys() == gradients_of(module).keys()
    late = {f"{SECOND}.weight", f"{SECOND}.bias"}
    assert names_with_gradient(module) == set(gradients_of(module)) - late


# Memory: what I lets go, what W lets go.


class Allocations(TorchDispatchMode):
    """Every memory that operations make, weakly; views have made none."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[torch.Size, StorageWeakRef]] = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        results = operation(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple | list) else [results]:
            if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in given:
                self.made.append((result.shape, StorageWeakRef(result.untyped_storage())))
        return results

    def alive(self) -> list[tuple[int, ...]]:
        """Shapes of what is left, each memory once, sorted; torch 2.10 keeps some without bytes."""
        left = {ref.cdata: tuple(shape) for shape, ref in self.made if not ref.expired()}
        return sorted(shape for shape in left.values() if 0 not in shape)


@pytest.fixture
def _without_collector() -> Iterator[None]:
    """Disable the garbage collector: tensors must be freed by reference counts only."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("recompute", [False, True])
def test_between_i_and_w_only_inputs_and_output_gradients_of_linears_are_held(recompute):
    inner = nn.Linear(WIDTH, 16, bias=False), nn.Tanh(), nn.GELU(), nn.Linear(16, 4, bias=False)
    module = chain(nn.Sequential(*inner), nn.Tanh()).double()
    if recompute:
        recompute_layers(module)
    stage = stage_of(module)
    module(*drawn(1, (5, 8)))  # the first forward runs on a clone of its input
    with Allocations() as memory:
        (x,), (gradient,) = drawn(1, (5, 8)), drawn(1, (5, 4))
        stage.forward(0, (x,), None)
        (returned,) = stage.backward_input(0, (gradient,))
        del gradient
    # x and what is returned; the second linear's input; both output gradients
    assert memory.alive() == sorted([(5, 8), (5, 8), (5, 16), (5, 16), (5, 4)])
    del x, returned
    assert memory.alive() == sorted([(5, 8), (5, 16), (5, 16), (5, 4)])
    with memory:
        stage.backward_weight(0)
    assert memory.alive() == sorted([(16, 8), (4, 16)])  # the gradients


@pytest.mark.usefixtures("_without_collector")
def test_recomputed_layers_hold_nothing_but_their_input_before_i():
    layer = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH))
    module = chain(layer, copy.deepcopy(layer)).double()
    recompute_layers(module)
    stage = stage_of(module)
    module(*drawn(1, (5, WIDTH)))  # the first forward runs on a clone of its input
    with Allocations() as memory:
        run(stage, "F0", drawn(1, (5, WIDTH)), None)
    assert memory.alive() == [(5, WIDTH), (5, WIDTH)]


@pytest.mark.usefixtures("_without_collector")
@pytest.mark.parametrize("autocast", [PLAIN, BFLOAT16])
@pytest.mark.parametrize("recompute", [False, True])
def test_an_input_of_several_linears_is_held_once(recompute, autocast):
    norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
    module = chain(nn.Sequential(norm, queries_keys_values(bias=False)), nn.Tanh())
    if recompute:
        recompute_layers(module)
    stage = stage_of(module, torch.float32, autocast)
    with Allocations() as memory:
        run(stage, "F0 I0", drawn(1, dtype=torch.float32), drawn(1, dtype=torch.float32))
    num_inputs, num_gradients = 1, 3
    assert len(memory.alive()) == num_inputs + num_gradients


@pytest.mark.usefixtures("_without_collector")
def test_each_w_lets_its_own_microbatch_go_and_a_full_backward_leaves_nothing():
    stage = stage_of(chain(linear(bias=False), nn.Tanh()).double())
    with Allocations() as memory:
        run(stage, "F0 F1 F2 B2 I0 I1", drawn(3), drawn(3))
        left = [len(memory.alive())]
        for microbatch in (1, 0):
            stage.backward_weight(microbatch)
            left.append(len(memory.alive()))
    assert left == [5, 3, 1]  # the gradient is there from the first backward on


# What is replaced, and what is not.


def test_a_stage_that_is_not_split_leaves_its_module_alone_and_does_all_in_i():
    module = chain(linear(), linear()).double()
    stage = stage_of(module, is_split=False)
    assert not any("forward" in vars(inner) for inner in module.modules())
    run(stage, "F0 I0", drawn(1), drawn(1))
    after_i = copy.deepcopy(gradients_of(module))
    assert stage.num_held == 1
    stage.backward_weight(0)
    assert_same(gradients_of(module), after_i)
    assert stage.num_held == 0


def test_a_failed_i_puts_nothing_off_afterwards():
    module = chain(linear()).double()
    plain = copy.deepcopy(module)
    stage = stage_of(module)
    inputs, given = drawn(1), drawn(1)
    run(stage, "F0", inputs, given)
    with pytest.raises(RuntimeError, match="shape"):
        stage.backward_input(0, (torch.ones(1, 1),))
    assert_same(run(stage, "F0 B0", inputs, given), run_plain(plain, inputs, given))


def test_what_is_put_off_of_a_conv1d_are_the_gradients_of_its_weight_and_bias():
    module = chain(conv1d(), conv1d()).double()
    stage = stage_of(module)
    run(stage, "F0 I0", drawn(1), drawn(1))
    assert names_with_gradient(module) == set()
    run(stage, "W0", [], [])
    assert len(names_with_gradient(module)) == 4
