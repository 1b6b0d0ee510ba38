"""Models of images and of plain vectors."""
