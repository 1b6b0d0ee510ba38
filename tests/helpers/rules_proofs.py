"""Laws, proofs and random terms that tests of the checker and of lifting share."""

from __future__ import annotations

import random

from soapstone.ir.law import Law
from soapstone.ir.term import Term, parse
from soapstone.rules.proving.check import missing_guards, replay
from soapstone.search.rules.proof import Step

LAWS = {
    law.name: law
    for law in (
        Law("add-associative", "add(x, add(y, z)) = add(add(x, y), z)"),
        Law("add-commutative", "add(x, y) = add(y, x)"),
        Law("transpose-inverse", "transpose(transpose(x)) = x"),
        Law("transpose-add", "transpose(add(x, y)) = add(transpose(x), transpose(y))"),
        Law("transpose-matmul", "transpose(matmul(x, y)) = matmul(transpose(y), transpose(x))"),
        Law(
            "transpose-concat",
            "concat[-1](transpose(x), transpose(y)) = transpose(concat[-2](x, y))",
        ),
        Law("transpose-relu", "transpose(relu(x)) = relu(transpose(x))"),
        Law("matmul-associative", "matmul(x, matmul(y, z)) = matmul(matmul(x, y), z)"),
        Law("matmul-add", "matmul(x, add(y, z)) = add(matmul(x, y), matmul(x, z))"),
        Law(
            "matmul-concat", "concat[-1](matmul(x, y), matmul(x, z)) = matmul(x, concat[-1](y, z))"
        ),
        Law(
            "matmul-sum",
            "matmul(concat[-1](x, z), concat[-2](y, w)) = add(matmul(x, y), matmul(z, w))",
        ),
        Law("matmul-identity", "matmul(x, identity_matrix) = x"),
        Law("split0-concat", "split0[a](concat[a](x, y)) = x"),
        Law("split1-concat", "split1[a](concat[a](x, y)) = y"),
        Law("concat-splits", "concat[a](split0[a](x), split1[a](x)) = x"),
        Law(
            "concat-add", "concat[a](add(x, y), add(z, w)) = add(concat[a](x, z), concat[a](y, w))"
        ),
        Law(
            "concat-geometry",
            "concat[a](concat[b](x, y), concat[b](z, w))"
            " = concat[b](concat[a](x, z), concat[a](y, w))",
            where=("a >= b+1",),
        ),
        Law("sum-of-one", "reduce_sum[a](x) = x", where=("dim(x,a) = 1",)),
        Law("concat-relu", "concat[a](relu(x), relu(y)) = relu(concat[a](x, y))"),
        Law("concat-associative", "concat[a](x, concat[a](y, z)) = concat[a](concat[a](x, y), z)"),
        Law(
            "conv-kernels",
            "concat[-3](conv2d[1,s,p,c](x, y), conv2d[1,s,p,c](x, z))"
            " = conv2d[1,s,p,c](x, concat[-4](y, z))",
        ),
        Law(
            "conv-groups",
            "concat[-3](conv2d[g,s,p,c](x, y), conv2d[h,s,p,c](z, w))"
            " = conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))",
            where=("dim(y,-4)*h = dim(w,-4)*g",),
        ),
        Law(
            "conv-linear",
            "conv2d[g,s,p,none](x, add(y, z)) = "
            "add(conv2d[g,s,p,none](x, y), conv2d[g,s,p,none](x, z))",
        ),
        Law("conv-enlarge", "conv2d[g,s,same,c](x, y) = conv2d[g,s,same,c](x, enlarge[k](y))"),
        Law("conv-identity", "conv2d[1,1,same,none](x, identity_kernel[k]) = x", ranks=("x=4",)),
        Law(
            "conv-pool",
            "conv2d[depthwise,s,p,none](x, pool_kernel[k]) = avg_pool2d[k,s,p,all](x)",
            ranks=("x=4",),
        ),
    )
}
R2 = dict.fromkeys("xyzw", 2)
R4 = dict.fromkeys("xyzw", 4)


def terms(text: str) -> tuple[Term, ...]:
    return tuple(parse(part) for part in text.split("; "))


def step(law: str, *path: int, back: bool = False, **bindings: object) -> Step:
    given = {n: parse(v) if isinstance(v, str) and "(" in v else v for n, v in bindings.items()}
    return Step(law, not back, path, given)  # type: ignore[arg-type]


def guards(
    source: str, target: str, ranks: dict[str, int], *chains: tuple[Step, ...]
) -> tuple[str, ...]:
    """Return what is missing, after checking that with it the proof holds."""
    one, other = terms(source), terms(target)
    found = missing_guards(one, other, ranks, chains, laws=LAWS)
    replay(one, other, ranks, found, chains, laws=LAWS)
    return found


GROUPED = (
    "concat[-3](conv2d[g,s,p,c](x, y), conv2d[h,s,p,c](z, w))",
    "conv2d[g+h,s,p,c](concat[-3](x, z), concat[-4](y, w))",
)


def random_term(rng: random.Random, rank: int, depth: int) -> Term:
    """Return a term of a tensor of a rank; ranks fit, extents may not."""
    if depth == 0 or rng.random() < 0.1:
        return Term(rng.choice("xyz") if rank == 2 else rng.choice(("x4", "y4", "k4")))
    one = random_term(rng, rank, depth - 1)
    other = random_term(rng, rank, depth - 1)
    axis = -rng.randint(1, rank)
    if rank == 4:
        kernel = rng.choice(("k4", "l4", "concat[-4](k4, l4)", "enlarge[3x3](k4)", "add(k4, l4)"))
        stride, padding = rng.choice((1, 2)), rng.choice(("same", "valid"))
        groups = rng.choice((1, 2, "depthwise"))
        options = [
            Term("conv2d", (groups, stride, padding, "none"), (one, parse(kernel))),
            Term("avg_pool2d", ("3x3", stride, padding, "all"), (one,)),
            Term("max_pool2d", ("1x3", stride, padding), (one,)),
        ]
    else:
        options = [
            Term("matmul", (), (one, other)),
            Term("transpose", (), (one,)),
            Term("add", (), (one, Term("r", (), ()))),
        ]
    options += [
        Term("add", (), (one, other)),
        Term("concat", (axis,), (one, other)),
        Term("concat", (axis,), (one, other)),
        Term(rng.choice(("split0", "split1")), (axis,), (one,)),
        Term(rng.choice(("softmax", "reduce_sum")), (axis,), (one,)),
        Term("relu", (), (one,)),
    ]
    return rng.choice(options)
