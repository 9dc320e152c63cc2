"""Templates: rendering them, the names they see, and how results look to them."""
