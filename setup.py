"""The packages: `soapstone`, and the folders at the top, which are its subpackages with theirs."""

from setuptools import find_packages, setup

TOPS = [
    "apps",
    "engine",
    "frontend",
    "ir",
    "kernels",
    "mappers",
    "native",
    "rules",
    "runtime",
    "search",
]

found = find_packages(include=[pattern for top in TOPS for pattern in (top, f"{top}.*")])
setup(
    packages=[
        *find_packages(include=["soapstone", "soapstone.*"]),
        *(f"soapstone.{n}" for n in found),
    ],
    package_dir={"soapstone": "soapstone", **{f"soapstone.{top}": top for top in TOPS}},
)
