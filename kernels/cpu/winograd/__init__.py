"""3x3 convolutions by Winograd's minimal filtering."""
