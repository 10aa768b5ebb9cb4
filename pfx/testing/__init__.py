"""How users prove their own parallel code: laws to assert, and strategies that draw cases for them.

    @hypothesis.given(pfx.testing.programs())
    def test_any_program(p):
        pfx.testing.assert_parallel_equal(p.fn, p.args, mesh=p.mesh, in_specs=p.specs, grad=True)

Import it by name, ``import pfx.testing``. Only the strategies need hypothesis.
"""

from pfx.testing.equality import assert_parallel_equal
from pfx.testing.gradients import assert_gradients
from pfx.testing.programs import SmallProgram, programs
from pfx.testing.strategies import meshes, shapes, specs, tensors, values
from pfx.testing.transposes import assert_transposes

__all__ = [
    # Laws.
    "assert_parallel_equal",
    "assert_transposes",
    "assert_gradients",
    # Strategies.
    "meshes",
    "shapes",
    "specs",
    "tensors",
    "programs",
    "SmallProgram",
    "values",
]
