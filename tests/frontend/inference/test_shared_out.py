"""Results may be written into the memory that holds the inputs."""

from __future__ import annotations

import numpy as np

from soapstone import Model


def test_a_new_number_of_rows_is_right_where_results_replace_the_inputs() -> None:
    model = Model("m", seed=0)
    model.output(model.dense(model.input("x", (4, 16)), 16, name="y"))
    rows = np.random.default_rng(0).standard_normal((5, 16)).astype(np.float32)
    with model.inference() as session:
        (name,) = session.run({"x": rows[:4]})
        session.serial.binder.packed.warmup.wait()
        right = session.run({"x": rows})[name].copy()
        x = rows.copy()
        session.run({"x": x}, out={name: x})
    np.testing.assert_allclose(x, right, rtol=1e-5, atol=1e-6)
