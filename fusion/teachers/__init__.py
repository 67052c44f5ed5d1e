"""Small models that know one task: they label what has no labels, and adapters are measured against them."""
