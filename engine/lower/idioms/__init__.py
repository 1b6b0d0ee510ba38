"""What files and networks spell out in several operators, recognised and made one (`fold.Site`)."""
