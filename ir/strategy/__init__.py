"""How a graph runs: each operator split and placed, values kept, moved and laid out."""

from soapstone.ir.strategy.configuration import Configuration, Copies, Keep, Reshard, Step
from soapstone.ir.strategy.strategy import DEFAULT, Strategy

__all__ = ["DEFAULT", "Configuration", "Copies", "Keep", "Reshard", "Step", "Strategy"]
