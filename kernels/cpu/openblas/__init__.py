"""Products and convolutions by OpenBLAS, where oneDNN is not there."""
