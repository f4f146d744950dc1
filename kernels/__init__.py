from matmix.kernels._provisional import *  # noqa
from matmix.kernels._provisional import gated_norm, matrix_product_scan, quasiseparable_scan, semiseparable_scan, short_conv  # noqa
