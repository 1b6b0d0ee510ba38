"""Products, convolutions and attention by NVIDIA's libraries, where these are installed.

Variants are preferred to the kernels written here, and decline what a library does not serve. What
is asked of a library is found by pure functions of layouts (`matrices.py`, `images.py`).
"""
