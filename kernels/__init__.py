"""The operations: scans over the sequence and the small operations around them, functions of plain tensors.

Every op has a definition (float64, easy to check), a PyTorch form that runs on any device and, for most, Triton
kernels; `backend="auto"` chooses.
"""

if __name__ == "kernels":
    # A Python that was started at the root of the repository has its folders on sys.path, and was asked for another
    # package of this name: transformers 5 looks for one. It gets that package where it is installed, else one that is
    # as empty as a folder without Python files.
    import sys
    from importlib import util
    from importlib.machinery import PathFinder
    from pathlib import Path

    _root = Path(__file__).resolve().parents[1]
    _spec = PathFinder.find_spec(__name__, [entry for entry in sys.path if Path(entry or ".").resolve() != _root])
    if _spec is not None and _spec.loader is not None:
        sys.modules[__name__] = util.module_from_spec(_spec)
        _spec.loader.exec_module(sys.modules[__name__])
    else:
        __file__, __path__ = None, []
else:
    from matmix.kernels.context import gathered, over_heads, over_heads_here
    from matmix.kernels.gated_norm.chunked import gated_norm_torch
    from matmix.kernels.gated_norm.op import gated_norm
    from matmix.kernels.lion.chunked import lion_mixer_torch
    from matmix.kernels.lion.op import lion_mixer, lion_mixer_is_fused
    from matmix.kernels.matrix_memory.chunked import matrix_memory_torch
    from matmix.kernels.matrix_memory.op import matrix_memory
    from matmix.kernels.matrix_product.chunked import matrix_product_chunked
    from matmix.kernels.matrix_product.op import matrix_product_scan
    from matmix.kernels.mru.chunked import mru_mixer_torch, mru_step_torch
    from matmix.kernels.mru.op import mru_mixer, mru_mixer_is_fused, mru_step
    from matmix.kernels.registration import finish_registration
    from matmix.kernels.s6.op import s6_scan, s6_scan_is_fused
    from matmix.kernels.scan_layer.chunked import scan_layer_torch
    from matmix.kernels.scan_layer.op import scan_layer
    from matmix.kernels.semiseparable.chunked import quasiseparable_chunked, semiseparable_chunked
    from matmix.kernels.semiseparable.chunked.forward import semiseparable_step_torch
    from matmix.kernels.semiseparable.op import quasiseparable_scan, semiseparable_scan
    from matmix.kernels.semiseparable.step import semiseparable_step
    from matmix.kernels.short_conv.chunked import short_conv_step_torch, short_conv_torch
    from matmix.kernels.short_conv.op import short_conv, short_conv_step

    finish_registration()

    PYTORCH_FORMS = {
        gated_norm: gated_norm_torch,
        gathered: None,
        lion_mixer: lion_mixer_torch,
        lion_mixer_is_fused: None,
        over_heads: over_heads_here,
        matrix_memory: matrix_memory_torch,
        matrix_product_scan: matrix_product_chunked,
        mru_mixer: mru_mixer_torch,
        mru_mixer_is_fused: None,
        mru_step: mru_step_torch,
        quasiseparable_scan: quasiseparable_chunked,
        s6_scan: None,
        s6_scan_is_fused: None,
        scan_layer: scan_layer_torch,
        semiseparable_scan: semiseparable_chunked,
        semiseparable_step: semiseparable_step_torch,
        short_conv: short_conv_torch,
        short_conv_step: short_conv_step_torch,
    }
    """All functions of this package -> what takes their place in an export, which runs without it: the PyTorch form, or
    None for a question whether there are kernels, to which the answer is no."""

    __all__ = ["PYTORCH_FORMS", *(function.__name__ for function in PYTORCH_FORMS)]
