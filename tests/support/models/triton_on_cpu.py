"""Triton's interpreter for machines without a GPU, made quick and right enough for the tests of the kernels."""

from __future__ import annotations

import dataclasses
import importlib
import os

import numpy
import torch


def import_kernels() -> None:
    """Import Triton and all modules of kernels so that they can be interpreted.

    Triton decides where a function is defined whether it is interpreted. Afterwards only tests that ask for the
    interpreter see the variable: subprocesses run as users run them.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    importlib.import_module("triton.language")  # before matmix: some of PyTorch imports it too
    backend = importlib.import_module("matmix.kernels.backend")
    for module in set(backend.TRITON_FORMS.values()):
        importlib.import_module(module)
    del os.environ["TRITON_INTERPRET"]


def names(launches: list) -> list[str]:
    """Of kernels, by launch."""
    return [found.kernel.__name__ for found in launches]


def interpret(monkeypatch) -> None:
    """Let CPU tensors go to Triton kernels, which the interpreter runs, until the test ends."""
    from triton.runtime import interpreter

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    # Twice as fast: every called function would replace the language's functions again, although a kernel's own stay
    # replaced while it runs and those of Triton's library, after its first call, for ever; and every sum of integers
    # would be computed a second time in 64 bits, to see whether it fits 32.
    plain_call, core = interpreter.InterpretedFunction.__call__, importlib.import_module("triton.language.core")

    def call(self, *args, **kwargs):
        if core.is_builtin(core.load):
            return plain_call(self, *args, **kwargs)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    _make_types_cheap(monkeypatch, core, interpreter)
    _make_operands_cheap(monkeypatch, core, interpreter)
    _make_sums_of_bits_cheap(monkeypatch, interpreter)
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))

    # bfloat16: the interpreter cuts bits off instead of rounding, and multiplies tiles of them as integers.
    def is_bfloat16(dtype) -> bool:
        return dtype.scalar.is_bf16()

    plain_cast = interpreter.InterpreterBuilder.cast_impl

    def cast(self, source, dtype):
        if is_bfloat16(source.dtype) and dtype.scalar.is_fp32():
            data = _torch(source.data).view(torch.bfloat16).float().numpy()
        elif source.dtype.scalar.is_fp32() and is_bfloat16(dtype):
            data = _torch(source.data).bfloat16().view(torch.uint16).numpy()
        else:
            return plain_cast(self, source, dtype)
        return interpreter.TensorHandle(data, dtype.scalar)

    def dot(self, a, b, acc, _precision, _imprecise):
        a, b = (cast(self, x, acc.dtype) if is_bfloat16(x.dtype) else x for x in (a, b))
        product = numpy.matmul(a.data, b.data, dtype=acc.data.dtype)
        return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)


def _make_types_cheap(monkeypatch, core, interpreter) -> None:
    """Every operation makes the types of its operands and of its result anew, which took a third of the time: tuples
    (of sizes, mostly) find their type when somebody asks, and the types of blocks and of NumPy, and the
    sizes of tensors, are remembered."""

    def make_tuple(self, args, type=None):
        self.values = list(args)
        self.given = type

    def type_of_tuple(self):
        if self.given is None:
            return core._type_for_tuple_values(self.values)
        return self.given if isinstance(self.given, core.tuple_type) else core.tuple_type(self.given)

    monkeypatch.setattr(core.tuple, "__init__", make_tuple)
    monkeypatch.setattr(
        core.tuple, "type", property(type_of_tuple, lambda self, type: setattr(self, "given", type)), False
    )

    plain_block, blocks = core.block_type.__init__, {}

    def make_block(self, element_ty, shape):
        key = element_ty.name, *map(core._unwrap_if_constexpr, shape)
        if key not in blocks:
            plain_block(self, element_ty, shape)
            blocks[key] = vars(self)
        self.__dict__ = blocks[key]

    monkeypatch.setattr(core.block_type, "__init__", make_block)

    plain_tensor = core.tensor.__init__

    def make_tensor(self, handle, type):
        if (like := vars(type).get("tensor")) is None:
            plain_tensor(self, handle, type)
            vars(type)["tensor"] = self.shape, self.numel, self.dtype
        else:
            self.handle, self.type = handle, type
            self.shape, self.numel, self.dtype = like

    monkeypatch.setattr(core.tensor, "__init__", make_tensor)

    plain_numpy, found = interpreter._get_np_dtype, {}

    def numpy_type(dtype):
        if dtype.name not in found:
            found[dtype.name] = plain_numpy(dtype)
        return found[dtype.name]

    monkeypatch.setattr(interpreter, "_get_np_dtype", numpy_type)


def _make_operands_cheap(monkeypatch, core, interpreter) -> None:
    """Two operands of one type and shape are taken as they are, and the tensors that numbers become are remembered;
    what stands between a call and a function of the language asks for less."""
    semantic = interpreter.TritonSemantic
    plain, numbers = semantic.binary_op_type_checking_impl, {}

    def splat(self, scalar, like):
        kind = like.type.with_element_ty(scalar.dtype)
        return core.tensor(self.builder.create_splat(kind, scalar.handle), kind)

    def broadcast(self, lhs, rhs):
        if lhs.type.is_block() != rhs.type.is_block():
            return (lhs, splat(self, rhs, lhs)) if lhs.type.is_block() else (splat(self, lhs, rhs), rhs)
        if not lhs.type.is_block() or lhs.type.shape.values == rhs.type.shape.values:
            return lhs, rhs
        return self.broadcast_impl_value(lhs, rhs)

    def check_operands(self, lhs, rhs, lhs_ptr=False, rhs_ptr=False, arithmetic=True, division=False):
        if isinstance(lhs, core.tensor):
            dtype = lhs.dtype
            if isinstance(rhs, core.tensor):
                if vars(lhs.type) is vars(rhs.type):
                    same = dtype.__class__ is core.dtype
                elif dtype.__class__ is core.dtype:
                    same = dtype.name == rhs.dtype.name
                else:
                    same = lhs_ptr and rhs.dtype.__class__ is core.dtype and rhs.dtype.is_int()
                # Half precision is divided as float32.
                if same and not (division and dtype.primitive_bitwidth == 16):
                    return broadcast(self, lhs, rhs)
            elif dtype.__class__ is core.dtype:
                key = id(vars(lhs.type)), rhs.__class__, rhs, arithmetic, division
                if key in numbers:
                    return lhs, numbers[key]
                left, right = plain(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, division)
                if left is lhs:
                    right.handle.data.flags.writeable = False
                    numbers[key] = right
                return left, right
        return plain(self, lhs, rhs, lhs_ptr, rhs_ptr, arithmetic, division)

    monkeypatch.setattr(semantic, "binary_op_type_checking_impl", check_operands)

    def patch(obj, name, member, builder, scope):
        mine, call = semantic(builder), getattr(member, "__wrapped__", member)

        def in_language(*args, **kwargs):
            kwargs["_semantic"] = mine
            return call(*args, **kwargs)

        scope.set_attr(obj, name, in_language)

    monkeypatch.setattr(interpreter, "_patch_attr", patch)


def _make_sums_of_bits_cheap(monkeypatch, interpreter) -> None:
    """`tl.xor_sum` is NumPy's, as other sums are, and no call of Python for each of its numbers."""
    plain = interpreter.ReduceOps.generic_reduce

    def reduce(self, input):
        if self.combine_fn != interpreter.tl.standard._xor_combine:
            return plain(self, input)
        found = numpy.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(found, input[0].dtype)

    monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", reduce)


def _torch(data: numpy.ndarray) -> torch.Tensor:
    return torch.from_numpy(numpy.ascontiguousarray(data)).reshape(data.shape)


def _poison(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan if x.is_floating_point() else torch.iinfo(x.dtype).max)


class PoisonedTorch:
    """torch, whose uninitialised tensors hold NaN, or the largest integer: put in a module's `torch`, it shows what is
    never written."""

    def __getattr__(self, name):
        found = getattr(torch, name)
        if name in ("empty", "empty_like"):
            return lambda *args, **kwargs: _poison(found(*args, **kwargs))
        return found
