"""MetaFlow's substitutions, as rules of the rule file (MetaFlow, sections 3 and 6.1).

The paper counts 14 and shows half of them; the rest of this list is what its published code has and
what TensorFlow XLA fuses. Seven are decided by lowering here, in every graph alike
(docs/lowering.md); the other seven are rules. The set is small enough that all graphs which it
reaches can be looked at (`exhaustive.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from soapstone.search.rules.rule import RuleFile
from soapstone.search.rules.rulebook import Floats, Rulebook, directions


@dataclass(frozen=True)
class Substitution:
    """A substitution of the paper: the directed rules that it is, or the pass that does it."""

    name: str
    rules: tuple[str, ...] = ()
    lowering: str = ""


SUBSTITUTIONS = (
    Substitution("two convolutions of one image", ("66cbc21'",)),  # Figure 4a
    Substitution("two products of one matrix", ("f37738d'",)),
    Substitution("a kernel enlarged", ("e9ed45d'",)),  # Figures 1 and 7
    Substitution("a convolution and what is added to it", ("a22c417'",)),  # Figure 4b
    Substitution("a multiplication distributed", ("27fca86", "bccbb12'", "21826bf'")),
    Substitution("commutative operators reordered", ("a0d7925", "761a814", "4a717fc")),
    Substitution("a common factor taken out", ("bccbb12", "21826bf", "27fca86'")),
    Substitution("convolution and batch norm", lowering="fold_batch_norms"),
    Substitution("convolution and relu", lowering="fuse_epilogues"),
    Substitution("product and activation", lowering="fuse_epilogues"),
    Substitution("convolution or product and bias", lowering="fuse_epilogues"),
    Substitution("element-wise operators", lowering="fuse_elementwise"),
    Substitution("what is split and joined again", lowering="merge_parts"),
    Substitution("concatenation in place", lowering="place_parts"),
)


def metaflow(file: RuleFile, floats: Floats = "zeros") -> Rulebook:
    """Return the substitutions that are rules, and hold on such floating-point tensors.

    Raises:
        RuleError: the file lacks one.
    """
    names = [name for each in SUBSTITUTIONS for name in each.rules]
    found = []
    for name in names:
        rule = file.rule(name.rstrip("'"))
        wanted = rule.identity + "'" * name.endswith("'")
        every = directions(rule)
        found += [each for each in every if each.name == wanted and each.keeps(floats)]
    return Rulebook(tuple(found))
