"""Laws of batched products and repeated operands: differences, scaled rows, outer products.

Sums and concatenations of products are in `laws_matmul.py`.
"""

from __future__ import annotations

from soapstone.ir.ops.elementwise.laws_pointwise import law, ranks

_BATCHED = "322", "332", "323", "233", "223", "232"
MATMUL_BATCHED_LAWS = (
    law(
        "matmul-sub",
        "matmul(x, sub(y, z)) = sub(matmul(x, y), matmul(x, z))",
        *ranks("x y z", "222", "333", *_BATCHED),
    ),
    law(
        "sub-matmul",
        "matmul(sub(x, y), z) = sub(matmul(x, z), matmul(y, z))",
        *ranks("x y z", "222", "333", *_BATCHED),
    ),
    law(
        "matmul-rows-product",
        "matmul(mul(x, y), z) = mul(matmul(x, z), y)",
        *ranks("x y z", "222", "333", *_BATCHED),
        where=("dim(y,-1) = 1",),
    ),
    law(
        "matmul-rows-quotient",
        "matmul(div(x, y), z) = div(matmul(x, z), y)",
        *ranks("x y z", "222", "333", *_BATCHED),
        where=("dim(y,-1) = 1",),
    ),
    law(
        "matmul-columns-product",
        "matmul(x, mul(y, z)) = mul(matmul(x, y), z)",
        *ranks("x y z", "222", "333", *_BATCHED),
        where=("dim(z,-2) = 1",),
    ),
    law(
        "matmul-columns-quotient",
        "matmul(x, div(y, z)) = div(matmul(x, y), z)",
        *ranks("x y z", "222", "333", *_BATCHED),
        where=("dim(z,-2) = 1",),
    ),
    law(
        "matmul-vector-product",
        "matmul(x, mul(y, z)) = mul(matmul(x, y), z)",
        *ranks("x y z", "221", "321", "331"),
    ),
    law(
        "matmul-vector-quotient",
        "matmul(x, div(y, z)) = div(matmul(x, y), z)",
        *ranks("x y z", "221", "321", "331"),
    ),
    law(
        "matmul-outer",
        "matmul(x, y) = mul(x, y)",
        *ranks("x y", "22", "33", "32"),
        where=("dim(x,-1) = 1",),
    ),
    law(
        "matmul-of-column",
        "matmul(transpose(x), y) = reduce_sum[-2](mul(x, y))",
        *ranks("x y", "22", "33"),
        where=("dim(x,-1) = 1",),
    ),
    law(
        "matmul-of-row",
        "matmul(x, transpose(y)) = reduce_sum[-1](mul(x, y))",
        *ranks("x y", "22", "33"),
        where=("dim(y,-2) = 1",),
    ),
    law(
        "matmul-batches",
        "matmul(concat[-3](x, y), z) = concat[-3](matmul(x, z), matmul(y, z))",
        *ranks("x y z", "332", "333"),
    ),
    law(
        "matmul-batches-right",
        "matmul(z, concat[-3](x, y)) = concat[-3](matmul(z, x), matmul(z, y))",
        *ranks("x y z", "332", "333"),
    ),
)
