"""Results: references, tiers, and the store that chooses between them."""
