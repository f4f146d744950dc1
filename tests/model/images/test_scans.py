"""Orders of patches: each is what its name says, and every mixer gives the mean of what it gives in each."""

import functools

import pytest
import torch
from failures import each
from mixer_cases import CASES, D_MODEL

from matmix.model.images.config import ImageConfig
from matmix.model.images.scans import column_order, column_snake, hilbert_order, row_snake, scan_orders
from matmix.model.mixers import MIXERS
from matmix.model.mixers.base import ScanOrders
from matmix.model.mixers.scans import lion

SIDE = 4
BIDIRECTIONAL = [name for name, case in CASES.items() if name == case.mixer and not case.causal]


def test_a_small_grid_by_hand():
    grid = torch.arange(6).view(2, 3)
    assert row_snake(grid).tolist() == [0, 1, 2, 5, 4, 3]
    assert column_order(grid).tolist() == [0, 3, 1, 4, 2, 5]
    assert column_snake(grid).tolist() == [0, 3, 4, 1, 2, 5]
    assert hilbert_order(torch.arange(4).view(2, 2)).tolist() in ([0, 1, 3, 2], [0, 2, 3, 1])


@pytest.mark.parametrize("side", [1, 2, 8])
def test_hilberts_curve_steps_to_neighbours(side):
    order = hilbert_order(torch.arange(side * side).view(side, side))
    y, x = order // side, order % side
    assert (y.diff().abs() + x.diff().abs() == 1).all()


@each("scan", ["row", "column", "both", "snake", "hilbert"])
@each("token", ["none", "first", "middle"])
@each("outside", [False, True])
def test_orders_are_permutations_with_the_class_token_in_its_place(scan, token, outside):
    if outside and token == "none":
        return
    image = ImageConfig(size=12, patch=4, class_token=token, class_outside=outside, scan=scan)
    orders = scan_orders(image, 3, 5)
    if orders is None:
        assert scan == "row"
        assert not outside
        return
    places = {"none": None, "first": 0, "middle": 7}[token]
    wanted = [place for place in range(15 + (token != "none")) if not (outside and place == places)]
    for order, inverse in zip(orders.places, orders.inverse(), strict=True):
        assert order.sort().values.tolist() == wanted
        assert [wanted[index] for index in order.new_tensor(range(len(order)))] == order[inverse].tolist()
        if places is not None and not outside:
            assert order[places] == places
    assert orders.outside == (places if outside else None)


@each("name", BIDIRECTIONAL)
def test_every_mixer_reads_in_every_order(name, randomize):
    mixer = randomize(CASES[name].build(max_seqlen=SIDE**2), 0.3, torch.float64)
    x = torch.randn(2, SIDE**2, D_MODEL, dtype=torch.float64)
    columns = scan_orders(ImageConfig(size=SIDE, patch=1, scan="column"), SIDE, SIDE)
    # The columns of a picture are the rows of that picture with both sides exchanged.
    turned = x.unflatten(1, (SIDE, SIDE)).transpose(1, 2).flatten(1, 2)
    wanted = mixer(turned).unflatten(1, (SIDE, SIDE)).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close(mixer.forward_in_orders(x, columns), wanted, rtol=1e-9, atol=1e-11)
    if mixer.name.startswith("lion"):
        return  # which adds before it divides
    both = scan_orders(ImageConfig(size=SIDE, patch=1, scan="both"), SIDE, SIDE)
    torch.testing.assert_close(mixer.forward_in_orders(x, both), (mixer(x) + wanted) / 2, rtol=1e-9, atol=1e-11)


# -- LION: masks are added ---------------------------------------------------------------------------------------------

LIONS = [("lion_lit", {}), ("lion_d", {}), ("lion_d", {"gate_sets": 2}), ("lion_s", {"gate_sets": 2}), ("lion_s", {})]


def _image(token, outside, scan="snake"):
    return ImageConfig(size=SIDE, patch=1, class_token=token, class_outside=outside, scan=scan)


def _lion(name, options, randomize, dtype, form):
    kind = MIXERS[name]
    config = kind.Config(headdim=4, form=form, **options)
    kind.check(D_MODEL, config)
    return randomize(kind(D_MODEL, config, causal=False, max_seqlen=17, output_std=0.02), 0.5, dtype)


def _gradients(mixer, x, function):
    x = x.clone().requires_grad_()
    y = function(x)
    cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    names = dict(mixer.named_parameters())
    found = torch.autograd.grad((y * cotangent).sum(), [x, *names.values()])
    return {"y": y, "x": found[0], **dict(zip(names, found[1:], strict=True))}


def _dense(mixer, x, orders: ScanOrders):
    """(M1 + M2) / 2 with the numbers of `gate_logits` and loops over pairs, then rows divided by their sums."""
    q, k, v = mixer.project(x)
    length, mask = x.shape[1], 0
    for index, order in enumerate(orders.places):
        which = index if getattr(mixer.config, "gate_sets", 1) == 2 else 0
        logits = mixer.gate_logits(x, which=which)
        whole = x.new_ones(x.shape[0], mixer.nheads, length, length)
        if logits is not None:
            gates = torch.sigmoid(logits).expand(*x.shape[:2], mixer.nheads)
            rows = whole.clone()
            for i, a in enumerate(order.tolist()):
                for j, b in enumerate(order.tolist()):
                    low, high = min(i, j), max(i, j)
                    rows[:, :, a, b] = gates[:, order[low + 1 : high + 1]].prod(1)
            whole = rows
        mask = mask + whole / len(orders.places)
    weights = torch.einsum("bihn,bjhn->bhij", q, k) * mask
    weights = weights / (weights.sum(-1, keepdim=True) + mixer.config.eps)
    return mixer.proj(torch.einsum("bhij,bjhp->bihp", weights, v).flatten(-2))


@pytest.mark.slow
@each("name, options", LIONS)
@each("token, outside", [("none", False), ("first", False), ("middle", True)])
def test_snake_masks_are_averaged_before_rows_are_divided(name, options, token, outside, randomize):
    """Every form and the matrix itself against products of gates, pair by pair, with all gradients."""
    orders = scan_orders(_image(token, outside), SIDE, SIDE)
    x = torch.randn(2, SIDE**2 + (token != "none"), D_MODEL, dtype=torch.float64)
    wanted = None
    for form in ("chunked", "attention", "recurrent"):
        mixer = _lion(name, options, randomize, torch.float64, form)
        if wanted is None:
            wanted = _gradients(mixer, x, lambda x, mixer=mixer: _dense(mixer, x, orders))
        found = _gradients(mixer, x, lambda x, mixer=mixer: mixer.forward_in_orders(x, orders))
        for key, value in wanted.items():
            torch.testing.assert_close(found[key], value, rtol=1e-9, atol=1e-11, msg=f"{form} {key}")
    dense = mixer.combine(mixer.mix(mixer.matrix_in_orders(x, orders), mixer.values(x)), x)
    torch.testing.assert_close(dense, wanted["y"], rtol=1e-9, atol=1e-11)


@pytest.fixture
def kernels(interpreter, monkeypatch):
    """LION's mixers run on Triton kernels; returns the device."""
    for name in ("lion_mixer", "lion_mixer_is_fused"):
        monkeypatch.setattr(lion, name, functools.partial(getattr(lion, name), backend="triton"))
    return interpreter


@pytest.mark.parametrize(("name", "options"), [LIONS[0], LIONS[2], LIONS[3]])
@pytest.mark.parametrize(("token", "outside"), [("none", False), ("middle", True)])
def test_the_kernels_average_snakes(kernels, launched, name, options, token, outside, randomize):
    orders = scan_orders(_image(token, outside), SIDE, SIDE, torch.device(kernels))
    x = torch.randn(1, SIDE**2 + (token != "none"), D_MODEL)
    exact = _lion(name, options, randomize, torch.float64, "attention").to(kernels)
    wanted = _gradients(exact, x.double().to(kernels), lambda x: exact.forward_in_orders(x, orders))
    mixer = _lion(name, options, randomize, torch.float32, "auto").to(kernels)
    found = _gradients(mixer, x.to(kernels), lambda x: mixer.forward_in_orders(x, orders))
    assert launched
    for key, value in wanted.items():
        error = (found[key].double() - value).norm() / value.norm().clamp(min=1e-3)
        assert error < 1e-5, (key, error)


@pytest.mark.slow
def test_compiled_whole(randomize):
    """Without a break in the graph, with the same numbers."""
    mixer = _lion("lion_s", {"gate_sets": 2}, randomize, torch.float32, "auto")
    x, image = torch.randn(1, SIDE**2, D_MODEL), _image("none", False)

    def read(x):
        return mixer.forward_in_orders(x, scan_orders(image, SIDE, SIDE))

    torch.compiler.reset()
    compiled = torch.compile(read, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), read(x), rtol=1e-5, atol=1e-6)


def test_the_two_sets_of_gates_belong_to_two_orders(randomize):
    """Where the second set is the first one, nothing changes; where rows and columns are exchanged, so are the sets."""
    x = torch.randn(2, SIDE**2, D_MODEL, dtype=torch.float64)
    orders = scan_orders(_image("none", False), SIDE, SIDE)
    two = _lion("lion_s", {"gate_sets": 2}, randomize, torch.float64, "chunked")
    swapped = ScanOrders(orders.places.flip(0))
    before = two.forward_in_orders(x, orders)
    assert not torch.allclose(two.forward_in_orders(x, swapped), before)
    two.a_i, two.a2_i = two.a2_i, two.a_i
    torch.testing.assert_close(two.forward_in_orders(x, swapped), before)
