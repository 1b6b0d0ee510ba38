"""Laws that are wrong, each in a way that some rule set got wrong or a weak test would miss."""

from __future__ import annotations

from soapstone.ir.law import Law


def law(text: str, *where: str, ranks: str = "") -> Law:
    return Law("wrong", text, where, (ranks,) if ranks else ())


WRONG = {
    "relu-convolution-is-linear": law(
        "conv2d[g,s,p,relu](add(x, y), z) ="
        " add(conv2d[g,s,p,relu](x, z), conv2d[g,s,p,relu](y, z))",
        "dim(x,-1) = dim(y,-1)",
        "dim(x,-2) = dim(y,-2)",
    ),
    "concat-is-associative-across-axes": law(
        "concat[-1](x, concat[-2](y, z)) = concat[-2](concat[-1](x, y), z)"
    ),
    "concat-in-another-order": law(
        "concat[-1](concat[-2](x, y), concat[-2](z, w)) ="
        " concat[-2](concat[-1](x, y), concat[-1](z, w))"
    ),
    "concat-of-grouped-kernels": law(
        "concat[-3](conv2d[g,s,p,c](x, y), conv2d[g,s,p,c](x, z)) ="
        " conv2d[g,s,p,c](x, concat[-4](y, z))"
    ),
    "concat-of-groups-of-other-sizes": law(
        "concat[-3](conv2d[g,s,p,c](x, y), conv2d[h,s,p,c](z, w)) ="
        " conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))"
    ),
    "concat-of-inputs-with-groups": law(
        "conv2d[g,s,p,none](concat[-3](x, z), concat[-3](y, w)) ="
        " add(conv2d[g,s,p,none](x, y), conv2d[g,s,p,none](z, w))"
    ),
    "enlarge-under-valid": law(
        "conv2d[g,s,valid,c](x, y) = conv2d[g,s,valid,c](x, enlarge[k](y))",
        "dim(y,-1) + 2 = k.w",
    ),
    "pool-kernel-for-averages-inside": law(
        "conv2d[depthwise,s,p,none](x, pool_kernel[k]) = avg_pool2d[k,s,p,inside](x)", ranks="x=4"
    ),
    "maximum-is-linear": law(
        "max_pool2d[k,s,p](add(x, y)) = add(max_pool2d[k,s,p](x), max_pool2d[k,s,p](y))"
    ),
    "maximum-of-joined-rows": law(
        "max_pool2d[k,1,p](concat[-2](x, y)) ="
        " concat[-2](max_pool2d[k,1,p](x), max_pool2d[k,1,p](y))"
    ),
    "matmul-commutes": law("matmul(x, y) = matmul(y, x)"),
    "transpose-keeps-the-order": law(
        "transpose(matmul(x, y)) = matmul(transpose(x), transpose(y))"
    ),
    "relu-of-a-scaled": law("relu(smul(x, w)) = smul(relu(x), w)", ranks="x=2 w=0"),
    "relu-of-a-sum": law("relu(add(x, y)) = add(relu(x), relu(y))"),
    "relu-of-a-product": law("relu(mul(x, y)) = mul(relu(x), relu(y))"),
    "split-of-a-swapped-concat": law("split0[a](concat[a](x, y)) = y"),
    "kernel-sum-with-smaller": law(
        "conv2d[g,s,p,none](x, add(y, z)) = add(conv2d[g,s,p,none](x, y), conv2d[g,s,p,none](x, z))"
    ),
    "mean-is-sum": law("reduce_mean[a](x) = reduce_sum[a](x)"),
    "identity-kernel-strided": law(
        "conv2d[g,s,same,none](x, identity_kernel[k]) = avg_pool2d[3x3,s,same,all](x)", ranks="x=4"
    ),
}
